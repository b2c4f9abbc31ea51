# `make check` is what a change must pass; LONG=1 adds the tests that take longer, and is the whole of what .ci/run checks.
# PYTHON is the interpreter that has the [test] extra.
# `make nightly` looks deeper, for hours; NIGHT is its seed: another one, other problems. MINDSPEED_MM_REPOSITORY names
# a clone of MindSpeed-MM, whose launch scripts are then read, release by release.
PYTHON ?= python
NIGHT ?= 1
# git directories of MindFormers with their history, for `make nightly`; none: that comparison is left out
MINDFORMERS ?=
# work tree of Megatron-LM, branch core_r0.16.0, for `make nightly`; none: exports are not held against its parser
MEGATRON ?=
# work tree of MindSpeed-LLM, for `make nightly`; none: its launch scripts are not read
MINDSPEED_LLM ?=
# Work trees of Ascend/MindSpeed 26.1.0_core_r0.12.1 and NVIDIA/Megatron-LM core_v0.12.1, for its parser.
MINDSPEED ?=
MEGATRON_0_12 ?=
# frameworks whose own parsers check exports (tests/frameworks/environments/), none: all; the folder of their environments
NAMES ?=
ENVIRONMENTS ?= .venv-frameworks
# checkout of pytorch/torchtitan, newer than 0.3, for `make nightly`; none: its parser is left out
TORCHTITAN ?=
# folder profiler/tinker of a checkout of Ascend/mstt, for `make nightly`; none: Tinker itself is left out
TINKER ?=
# checkouts of PKU-DAIR/Hetu-Galvatron and FeixLiu/paddle-galvatron, for `make nightly`; none: they are left out
GALVATRON ?=
PADDLE_GALVATRON ?=
# sources of hetu-galvatron 2.4.0 (pip download --no-deps --no-binary :all:), for `make nightly`; none: they are left out
GALVATRON_2_4_0 ?=
# work tree of NVIDIA-NeMo/Megatron-Bridge of 0.6 or later, for `make nightly`; none: its modules' sections are left out
MEGATRON_BRIDGE ?=
# folder for clones of Megatron-LM, MindSpeed-LLM and MindSpeed-MM, made where they are missing, for `make nightly`; none:
# plans are not written into their scripts
LAUNCH_SCRIPTS ?=
# checkouts with configurations of frameworks, for `make nightly`; none: `lint` looks at none
CONFIGURATIONS ?=
# folders with training logs, for `make nightly`; none: none are read
LOGS ?=
# folder with checkouts of other planners, for `make nightly` (tests/benchmarks/compare_planners.py); none: left out
PLANNERS ?=

.PHONY: check lint types docs test seconds quick format nightly check-frameworks

check:
	$(MAKE) --no-print-directory --jobs=2 lint docs
	$(MAKE) --no-print-directory --jobs=2 types test

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

docs:
	$(PYTHON) docs/tools/renew.py --check
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet

test:
	$(PYTHON) -m pytest -n auto --dist worksteal -m "$(if $(LONG),,not long and )not nightly"

seconds:
	$(PYTHON) -m pytest -n auto --dist worksteal -m "not nightly" --record-seconds

quick:
	$(PYTHON) -m pytest -n auto --dist worksteal -m "not slow and not nightly"

nightly:
	$(PYTHON) -m pytest -n auto --dist worksteal -m nightly
	$(PYTHON) tests/packaging/wheel.py -n auto --dist worksteal
	$(PYTHON) tests/oracle/compare.py --problems 200000 --seed $(NIGHT)0000000
	$(PYTHON) tests/oracle/compare.py --problems 20000 --seed $(NIGHT)0000000 --schedule seq_1f1b_2
	$(PYTHON) tests/oracle/compare.py --problems 20000 --seed $(NIGHT)0000000 --schedule seq_1f1b_4
	$(PYTHON) tests/oracle/compare_free.py --problems 10000 --seed $(NIGHT)00000
	$(PYTHON) tests/oracle/compare_encoders.py --problems 2000 --seed $(NIGHT)0000
	$(PYTHON) tests/oracle/expert_jobs.py --jobs 200 --seed $(NIGHT)000
	$(PYTHON) tests/oracle/metamorphic_jobs.py --jobs 100 --seed $(NIGHT)000
	$(PYTHON) tests/oracle/methods.py --problems 4000 --seed $(NIGHT)000000
	$(PYTHON) tests/oracle/mutate_certificates.py --certificates 2000 --seed $(NIGHT)0000
	$(PYTHON) tests/reliability/attack.py --mutations 4600 --seed $(NIGHT)
	$(PYTHON) tests/reliability/kills.py --kills 200 --seed $(NIGHT)
	$(PYTHON) tests/reliability/signals_while_tracing.py --signals 500 --seed $(NIGHT)
	$(PYTHON) tests/frameworks/mindspeed_mm_census.py $(if $(MINDSPEED_MM_REPOSITORY),--repository $(MINDSPEED_MM_REPOSITORY))
	$(PYTHON) tests/frameworks/megatron_core_parser.py --plans 300 --seed $(NIGHT) $(if $(MEGATRON),--megatron $(MEGATRON))
	$(PYTHON) tests/frameworks/megatron_core_census.py $(if $(MEGATRON),--megatron $(MEGATRON))
	$(PYTHON) tests/frameworks/megatron_core_census.py $(if $(MINDSPEED_LLM),--megatron $(MINDSPEED_LLM)/examples)
	$(PYTHON) tests/frameworks/mindspeed_llm_parser.py --seed $(NIGHT) $(if $(MINDSPEED_LLM),--mindspeed-llm $(MINDSPEED_LLM)) $(if $(MINDSPEED),--mindspeed $(MINDSPEED)) $(if $(MEGATRON_0_12),--megatron $(MEGATRON_0_12))
	$(PYTHON) tests/frameworks/environments.py --folder $(ENVIRONMENTS)
	$(PYTHON) tests/frameworks/torchtitan_main_parser.py --seed $(NIGHT) $(if $(TORCHTITAN),--checkout $(TORCHTITAN) --environment $(ENVIRONMENTS)/torchtitan)
	$(PYTHON) tests/frameworks/tinker_upstream.py --seed $(NIGHT) $(if $(TINKER),--tinker $(TINKER) --environment $(ENVIRONMENTS)/tinker)
	$(PYTHON) tests/frameworks/galvatron_2_4_0.py --seed $(NIGHT) $(if $(GALVATRON_2_4_0),--sources $(GALVATRON_2_4_0) --python $(ENVIRONMENTS)/galvatron/bin/python)
	$(PYTHON) tests/frameworks/galvatron_upstream.py --seed $(NIGHT) $(if $(GALVATRON),--galvatron $(GALVATRON) --environment $(ENVIRONMENTS)/galvatron) $(if $(PADDLE_GALVATRON),--paddle $(PADDLE_GALVATRON))
	$(PYTHON) tests/frameworks/megatron_bridge_mimo.py --seed $(NIGHT) $(if $(MEGATRON_BRIDGE),--bridge $(MEGATRON_BRIDGE))
	$(PYTHON) tests/frameworks/launch_scripts_census.py $(if $(LAUNCH_SCRIPTS),--sources $(LAUNCH_SCRIPTS) --fetch)
	$(PYTHON) tests/frameworks/examples_census.py $(if $(LAUNCH_SCRIPTS),--sources $(LAUNCH_SCRIPTS) --fetch)
	$(PYTHON) tests/frameworks/lint_config_census.py $(CONFIGURATIONS)
	$(PYTHON) tests/frameworks/lint_census.py $(if $(MEGATRON),--megatron $(MEGATRON))
	$(PYTHON) tests/frameworks/mindformers_census.py $(MINDFORMERS)
	$(PYTHON) tests/frameworks/mindspeed_mm_fsdp_census.py --plans 40 --seed $(NIGHT)
	$(PYTHON) tests/hooks/older_torch.py 2.1.0
	$(PYTHON) tests/hooks/older_torch.py 2.6.0
	$(PYTHON) tests/hooks/older_torch.py 2.7.1 --tests
	$(PYTHON) tests/real_mindspeed_mm/compare_losses.py
	$(PYTHON) tests/profilers/trace/model_types_census.py
	$(PYTHON) tests/profilers/trace/every_type.py
	$(PYTHON) tests/frameworks/mindformers_published.py $(MINDFORMERS)
	$(PYTHON) tests/measurements/logs/real_logs.py $(LOGS)
	$(PYTHON) tests/benchmarks/ablation.py --limit 5
	$(PYTHON) tests/benchmarks/ablate_costs.py
	$(PYTHON) tests/benchmarks/ablate_costs.py --modern
	$(PYTHON) tests/benchmarks/few_rows.py examples/published_measurements/megatron_bridge_performance.csv --device h100-80g,b200-192g,b300-288g,gb200-192g,gb300-288g --spread 0.5 --families
	$(PYTHON) tests/benchmarks/multimodal_clusters.py
	$(if $(PLANNERS),$(PYTHON) tests/benchmarks/compare_planners.py --sources $(PLANNERS) --fetch)

# Holds exports against other frameworks' own parsers, in environments that are made where they are not there yet.
check-frameworks:
	$(PYTHON) tests/frameworks/environments.py --folder $(ENVIRONMENTS) $(NAMES)

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
