# Everything that is built, tested and checked. `make help` lists the targets.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
# A step that fails does not hide the steps after it.
MAKEFLAGS += --keep-going

CARGO ?= cargo
PYTHON ?= python3
CC ?= cc
CXX ?= c++

have = $(shell command -v $(1) 2>/dev/null)
# Found by being there: a language without tests is passed over.
C_TESTS := $(wildcard ffi/tests/*.c tests/c/*.c examples/*.c)
CXX_TESTS := $(wildcard ffi/tests/*.cpp)
TARGET := $(or $(CARGO_TARGET_DIR),target)
# Always together: with other packages beside them, dependencies have other features, and are built once more.
RELEASE := --package glake --package glake-ffi --package glake-preload --package glake-python
# What Rust's tests are built with, so that nothing is built twice. GPU tests and users take the release.
TESTED := --workspace --lib --bins --tests
# Many tests wait for processes and clocks: three at a time for two cores.
AT_A_TIME := $(shell echo $$((($$(nproc) * 3 + 1) / 2)))

.PHONY: help build test test-plan soak test-rust test-doc test-c test-python test-docs wheel gpu-test header generated lint fmt words clippy docs links features deny msrv clean

help: ## List the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r target text; do printf '  make %-12s %s\n' "$$target" "$$text"; done

build: ## Build target/release/glake, libgmlake.so and libglake_preload.so, optimized
	$(CARGO) build --locked --release $(RELEASE)

# The wheel last: what it is built with has its module, and that of the others, built once more.
test: test-plan test-rust test-doc test-c test-docs test-python ## Run every test there is (Rust, C, Python), building what it needs

test-plan:
	@echo "make test: about $$((24 / $$(nproc) < 4 ? 4 : 24 / $$(nproc))) minutes on $$(nproc) cores, more where dependencies are built first. It skips:"
	@echo "  long random programs          (make soak runs them)"
	@[ -e /dev/nvidiactl ] && echo "  tests on GPUs                 (make gpu-test runs them)" || \
		echo "  tests on GPUs                 (no NVIDIA GPU here: /dev/nvidiactl is missing)"
	@$(PYTHON) -c 'import torch' 2>/dev/null || echo "  Python tests that need torch  ($(PYTHON) has no torch: pip install torch)"
	@[ -n "$(call have,cargo-nextest)" ] || \
		echo "  (cargo-nextest is missing: tests run by cargo test, which takes longer; cargo install --locked cargo-nextest)"

soak: ## Long random programs, and ranks that are interrupted at every place: tests that look for GLAKE_SOAK
	GLAKE_SOAK=1 $(CARGO) test --locked --workspace --lib --tests soak_ -- --nocapture
	$(CARGO) build --locked $(TESTED)
	cp "$(TARGET)/debug/lib_glake.so" ffi/python/glake/_glake.abi3.so
	@for test in test_ranks.py test_activations.py test_weights_hf.py; do \
		GLAKE_SOAK=1 PYTHONPATH="$(CURDIR)/ffi/python" GLAKE_LIBRARY="$(abspath $(TARGET))/debug/libgmlake.so" \
			$(PYTHON) -m unittest discover --start-directory ffi/python/tests --pattern "$$test" || exit 1; \
	done

# What C, Python and the documents need as well is built together with the tests: on all cores, not one after the other.
test-rust: ## Rust tests of every crate
	$(CARGO) build --locked $(TESTED)
ifneq ($(call have,cargo-nextest),)
	$(CARGO) nextest run --locked --workspace --no-fail-fast --no-tests pass --status-level fail --final-status-level slow --test-threads $(AT_A_TIME)
else
	timeout 1500 $(CARGO) test --locked --workspace --exclude glake-schedules --lib --bins --tests --no-fail-fast
	$(CARGO) test --locked --package glake-schedules schedules
endif

# The schedules' crate is built with the others, or they would be built anew without it; its examples are runtime's.
test-doc: ## Examples in the documentation of every crate
	$(CARGO) test --locked --workspace --doc -- --skip runtime/schedules

test-c: ## C tests, against libgmlake.so
ifneq ($(C_TESTS),)
	$(CARGO) build --locked $(TESTED)
	@mkdir -p "$(TARGET)/c-tests"
	@printf '%s\n' $(C_TESTS) | xargs -P $(AT_A_TIME) -I % bash -c '\
		program="$(TARGET)/c-tests/$$(basename % .c)"; \
		said=$$( { $(CC) -std=c11 -Wall -Wextra -Werror -Iffi/include % -o "$$program" \
			-L"$(TARGET)/debug" -lgmlake -Wl,-rpath,"$(abspath $(TARGET))/debug" -lpthread && \
			GLAKE_DEVICE=sim "$$program"; } 2>&1) || { echo "C test % FAILED: $$said"; exit 1; }; \
		echo "C test %$${said:+: $$said}"'
	@echo | $(CC) -shared -x c - -o "$(TARGET)/libc10.so" -Wl,-soname,libc10.so
	@for test in $(CXX_TESTS); do \
		echo "C test $$test"; \
		$(CXX) -std=c++17 -Wall -Wextra -Werror -Iffi/include "$$test" -o "$(TARGET)/c-tests/torch" \
			-L"$(TARGET)/debug" -lgmlake -Wl,-rpath,"$(abspath $(TARGET))/debug" -ldl; \
		GLAKE_DEVICE=sim GLAKE_FAKE_C10="$(abspath $(TARGET))/libc10.so" "$(TARGET)/c-tests/torch"; \
	done
endif

test-python: ## Python tests of the wheel that users install; of the package in place where no wheel can be built
	$(CARGO) build --locked $(TESTED)
	@scripts=0; printf '%s\n' benches/tests tests/gpu/tests | \
		xargs -P 2 -I % $(PYTHON) -m unittest discover --start-directory % || scripts=$$?; \
	outcome=0; CARGO="$(CARGO)" PYTHON="$(PYTHON)" ffi/python/wheel.sh --test "$(abspath $(TARGET))" || outcome=$$?; \
	[ "$$outcome" = 3 ] || exit $$((outcome | scripts)); \
	cp "$(TARGET)/debug/lib_glake.so" ffi/python/glake/_glake.abi3.so; \
	echo "Python tests of the package in place"; \
	PYTHONPATH="$(CURDIR)/ffi/python" GLAKE_LIBRARY="$(abspath $(TARGET))/debug/libgmlake.so" \
	GLAKE_PRELOAD="$(abspath $(TARGET))/debug/libglake_preload.so" $(PYTHON) ffi/python/tests/run.py || outcome=1; \
	[ "$$outcome" = 3 ] || scripts=1; exit $$scripts

test-docs: ## What README and docs say to type, on simulated GPUs; what needs more is listed
	$(CARGO) build --locked $(TESTED)
	cp "$(TARGET)/debug/lib_glake.so" ffi/python/glake/_glake.abi3.so
	$(PYTHON) tests/docs.py blocks "$(abspath $(TARGET))/debug"

wheel: ## The Python package, as a wheel in target/wheels
	@CARGO="$(CARGO)" PYTHON="$(PYTHON)" ffi/python/wheel.sh "$(abspath $(TARGET))"

gpu-test: ## Tests that need a GPU; passed over, with a word, where there is none
	@if [ -e /dev/nvidiactl ]; then \
		$(CARGO) test --locked --workspace --exclude glake-schedules --release --lib --bins --tests -- --nocapture --test-threads 1 cuda; \
		$(CARGO) build --locked --release --workspace; \
		failed=0; \
		tests/gpu/checks.sh "$(TARGET)/release" || failed=1; \
		PYTHON="$(PYTHON)" tests/gpu/torch.sh "$(TARGET)/release" || failed=1; \
		PYTHON="$(PYTHON)" tests/gpu/docs.sh "$(TARGET)/release" || failed=1; \
		exit $$failed; \
	else \
		echo "gpu-test: SKIPPED: no NVIDIA GPU on this machine (/dev/nvidiactl is missing)"; \
	fi

header: ## Write ffi/include/gmlake.h anew
	GLAKE_WRITE_HEADER=1 $(CARGO) test --locked --package glake-ffi --test header

generated: ## Write anew configs/default.toml, C's statistics, and the parts of docs that come from the code
	UPDATE=1 $(CARGO) test --locked --package glake-runtime --test generated

lint: fmt words clippy docs links features deny msrv ## Everything that is checked without running it

fmt: ## Formatting
	$(CARGO) fmt --all --check

clippy: ## Lints, warnings denied
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings

docs: ## Documentation, warnings denied
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps --document-private-items --lib

words: ## Doc comments that cannot be read without their code
	@$(PYTHON) tests/words.py

links: ## Links and headings of every page
	@$(PYTHON) tests/docs.py links

features: ## Every feature of every crate by itself, and none
	@$(CARGO) metadata --locked --no-deps --format-version 1 | $(PYTHON) -c 'import json, sys; \
		[print(p["name"], f or "-") for p in json.load(sys.stdin)["packages"] if p["features"] \
		for f in ["", *sorted(set(p["features"]) - {"default"})]]' | \
	while read -r crate feature; do \
		if [ "$$feature" = hwloc ] && \
			! echo 'int main(void) { return 0; }' | $(CC) -x c - -lhwloc -o /dev/null 2>/dev/null; then \
			echo "features: SKIPPED: $$crate with hwloc: libhwloc is missing (apt-get install libhwloc-dev)"; \
			continue; \
		fi; \
		echo "features: $$crate with $${feature/#-/none}"; \
		$(CARGO) clippy --locked --quiet --package "$$crate" --all-targets --no-default-features \
			--features "$${feature/#-/}" -- -D warnings </dev/null; \
	done

# The list of known faults is a repository of GitHub's: where that cannot be reached, the rest is checked.
deny: ## Licences, known faults, duplicates and sources of what is depended on (deny.toml)
	@if ! $(CARGO) deny --version >/dev/null 2>&1; then \
		echo "deny: SKIPPED: cargo-deny is missing (cargo install --locked cargo-deny)"; \
		exit 0; \
	fi; \
	$(CARGO) deny --locked check --hide-inclusion-graph bans licenses sources; \
	if $(CARGO) deny fetch db >/dev/null 2>&1; then \
		$(CARGO) deny --locked check --hide-inclusion-graph --disable-fetch advisories; \
	else \
		echo "deny: SKIPPED: known faults: their list, RustSec's advisory-db, cannot be fetched"; \
	fi

# clippy's incompatible_msrv looks for what the standard library lacks there, whatever version lints.
msrv: ## Whether the declared Rust is enough for the crates, and for what they depend on
	@declared=$$(sed -nE 's/^rust-version = "(.*)"/\1/p' Cargo.toml); \
	$(CARGO) metadata --locked --format-version 1 | $(PYTHON) -c 'import json, sys; \
		number = lambda text: tuple(map(int, text.split("."))); \
		packages = json.load(sys.stdin)["packages"]; \
		newer = [p["name"] + " " + p["version"] + " needs Rust " + p["rust_version"] for p in packages \
			if number(p["rust_version"] or "0")[:2] > number(sys.argv[1])]; \
		sys.exit("msrv: Rust " + sys.argv[1] + " is declared: " + ", ".join(newer) if newer else 0)' "$$declared"; \
	installed=$$(rustc --version | cut -d" " -f2); \
	if [ "$${installed%.*}" = "$$declared" ]; then \
		echo "msrv: Rust $$declared is declared, and builds and lints here"; \
	elif rustup run "$$declared" cargo --version >/dev/null 2>&1; then \
		rustup run "$$declared" cargo check --locked --quiet --workspace --all-targets --target-dir "$(TARGET)/msrv"; \
	else \
		echo "msrv: SKIPPED: Rust $$declared is declared, $$installed is installed: rustup toolchain install $$declared"; \
	fi

clean: ## Remove what was built
	$(CARGO) clean
