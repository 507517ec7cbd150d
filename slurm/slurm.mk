# Slurm: included by the Makefile. With SITE=…, or where there is sbatch, train, merge, serve and eval are jobs
# (make MODE CLUSTER= : here all the same).
SITE ?=
NODES ?=
SBATCH ?=
NAME ?=
CLUSTER := $(if $(SITE),$(SITE),$(shell command -v sbatch))
JOB_WORDS = --recipe $(RECIPE) $(if $(RUN),--run $(RUN)) $(if $(SITE),SITE=$(SITE)) $(ARGS)
JOB_OPTIONS = $(if $(NODES),--nodes=$(NODES)) $(SBATCH)
# Preparing needs the network, which the login node has; a report is read where one sits.
JOB_prepare = slurm/prepare.sh $(JOB_WORDS)
JOB_report = slurm/here.sh report $(JOB_WORDS)
RUN_AS_JOB = $(or $(JOB_$(1)),slurm/submit.sh $(JOB_OPTIONS) $(1) $(JOB_WORDS))

.PHONY: pipeline status site test-slurm
pipeline: ## prepare here, then train, merge and eval as jobs that wait for each other (SITE=… NODES=… SBATCH='--time=…')
	slurm/pipeline.sh $(JOB_OPTIONS) $(JOB_WORDS)

status: ## where a run stands: queue, step, loss, time left, server  (RUN=…)
	$(if $(CLUSTER),slurm/here.sh,entrypoints/entrypoint.sh) status $(if $(RUN),--run $(RUN),--recipe $(RECIPE)) \
	  $(if $(SITE),SITE=$(SITE))

site: ## look at this cluster and write slurm/sites/NAME.env   (NAME=…)
	slurm/site.sh $(NAME)

test-slurm: setup ## a real cluster of three nodes on this machine, the whole chain in a real SIF (root, 30 GB without one)
	WHERRY_CI_KEEP=$(filter 1,$(WHERRY_CI_KEEP)) $(PYTHON) -m pytest -v -rs -p no:cacheprovider -n 2 --dist loadfile --no-loadscope-reorder \
	  tests/slurm
