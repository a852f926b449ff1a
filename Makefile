# What a newcomer needs: `make demo` and `make test`. The rest is for maintainers.
.DEFAULT_GOAL := help
.PHONY: help demo test test-all check unit sandbox-test venv sandbox packages docs clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: venv ## Watch Muri do its job on a real Slurm, with and without, and compare.
	@scripts/demo

test: ## Check types and style, and test everything, on a real Slurm too.
	@scripts/test

ifdef SLURM
test-all:
	@scripts/test-release "$(SLURM)" "$(RELEASE)"
else
test-all: test ## The slow tests, too; SLURM=DIR [RELEASE=TAG]: those on a Slurm from its source.
	@scripts/test-rest
endif

venv: ## Make .venv (third-party packages come from a cache outside the checkout).
	@scripts/make-venv

check: venv ## Style, types and the arrows between rooms.
	@scripts/check

unit: venv ## Tests that need no Slurm.
	@scripts/test-unit -n 4

sandbox-test: venv ## Tests on the sandbox, a real Slurm on this machine.
	@scripts/test-sandbox

sandbox: venv ## Start a sandbox to play in: bin/muri-sandbox shell
	@bin/muri-sandbox up

packages: venv ## Build .deb and .rpm into out/packages (SUITES=trixie: for one Debian release and its Slurm).
	@scripts/build-packages $(SUITES)

docs: venv ## Build the site of the documentation into out/docs.
	@scripts/docs

clean: ## Remove what was made in this checkout; the cache stays.
	@rm -rf .venv build out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
