.PHONY: bench-merge
bench-merge: setup ## wherry merge against PEFT and a plain copy (30 GB of disk in TMPDIR, 10 minutes)
	$(PYTHON) tests/bench/merge.py $(ARGS)
