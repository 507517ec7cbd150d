"""A stand-in for pynvml: there is no GPU where unit tests run. It answers as a healthy node of eight H100 does.

Only what wherry.doctor asks is there; anything else raises AttributeError, as an old library would.
"""

from types import SimpleNamespace


class Nvml:
    """Each list holds one value a GPU; tests change them."""

    def __init__(self, count: int = 8) -> None:
        self.count = count
        self.driver = "570.86.15"
        self.name = ["NVIDIA H100 80GB HBM3"] * count
        self.total = [81559 << 20] * count
        self.used = [600 << 20] * count
        self.processes: list[list[int]] = [[] for _ in range(count)]
        self.ecc = [0] * count
        self.rows = [(0, 0, 0, 0)] * count  # corrected, uncorrected, pending, failed
        self.clocks = [0] * count
        self.links = [[1] * 18 for _ in range(count)]
        self.mig = [(0, 0)] * count
        self.mode = [0] * count
        self.p2p: dict[tuple[int, int], int] = {}

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlSystemGetDriverVersion(self):
        return self.driver

    def nvmlDeviceGetName(self, gpu):
        return self.name[gpu]

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(used=self.used[gpu], total=self.total[gpu])

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return [SimpleNamespace(pid=pid) for pid in self.processes[gpu]]

    def nvmlDeviceGetTotalEccErrors(self, gpu, kind, counter):
        assert (kind, counter) == (1, 0)  # uncorrected, volatile
        return self.ecc[gpu]

    def nvmlDeviceGetRemappedRows(self, gpu):
        return self.rows[gpu]

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
        return self.clocks[gpu]

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        return self.links[gpu][link]

    def nvmlDeviceGetMigMode(self, gpu):
        return self.mig[gpu]

    def nvmlDeviceGetComputeMode(self, gpu):
        return self.mode[gpu]

    def nvmlDeviceGetP2PStatus(self, one, other, capability):
        assert capability == 0  # read
        return self.p2p.get((one, other), 0)
