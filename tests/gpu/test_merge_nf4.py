"""merge.base: nf4 is computed on the CPU; training quantised on the GPU. Are the two the same numbers?"""

import pytest

from wherry.device import has_gpu

pytestmark = pytest.mark.skipif(not has_gpu(), reason="LOUD: no NVIDIA GPU is visible here")


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", [(2048, 2048), (512, 8192), (8192, 512), (1000, 1088)])
def test_the_cpu_gives_what_the_gpu_quantised(tmp_path, shape, double):
    import bitsandbytes.functional as bnb
    import torch
    from safetensors.torch import save_file

    from wherry.merge.nf4 import Nf4
    from wherry.merge.stream import Source
    from wherry.safetensors_file import read_header

    torch.manual_seed(0)
    weight = (0.02 * torch.randn(shape)).bfloat16()
    save_file({"w": weight}, tmp_path / "w.safetensors")
    source = Source(tmp_path / "w.safetensors", read_header(tmp_path / "w.safetensors").tensors["w"])
    ours = Nf4(source, "nf4", double)
    found = torch.cat([ours.rows(at, min(at + 256, shape[0])) for at in range(0, shape[0], 256)])
    packed, state = bnb.quantize_4bit(weight.cuda(), blocksize=64, quant_type="nf4", compress_statistics=double)
    expected = bnb.dequantize_4bit(packed, state).cpu()
    apart = found != expected
    print(f"{shape}, double quantisation {double}: {int(apart.sum())} of {apart.numel()} numbers differ")
    if not double:
        assert not apart.any()
    # The mean of all absmax is summed in another order: near a limit, one is coded a step of its 8 bits further.
    assert apart.float().mean() < 1e-3
    torch.testing.assert_close(found, expected, rtol=2**-5, atol=0)
