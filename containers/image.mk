# Images: included by the Makefile.
.PHONY: image sif smoke test-containers

image: ## build what this machine can: image and SIF with docker or podman, SIF alone with apptainer
	containers/image.sh image

sif: ## build build/wherry.sif from Apptainer.def, as an ordinary user
	containers/image.sh sif

smoke: ## build and prove the image with vLLM's CPU build (docker or podman)
	containers/image.sh smoke

# The tests run from the checkout's environment; they install podman, apptainer and the rest by themselves, as root.
test-containers: setup $(MODEL) ## build both images for real, compare and run them (root, Debian bookworm, 45 GB, 20 min)
	$(PYTHON) -m pytest -v -rs -p no:cacheprovider tests/containers
