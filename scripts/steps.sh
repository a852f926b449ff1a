# Sourced by scripts/test and scripts/test-rest: steps, with the time that each took.
failed=()
times=()
mkdir -p out
unset PYTHONDONTWRITEBYTECODE # each of thousands of processes would compile its modules anew

step() { # NAME COMMAND…
    local name=$1 began_s=$SECONDS
    shift
    printf '\n=== %s\n' "$name"
    "$@" || failed+=("$name")
    times+=("$(printf '%5d s  %s' $((SECONDS - began_s)) "$name")")
}

prepare() {
    scripts/make-venv || exit 1
    step "browser for the reports' tests" scripts/install-chromium
    step "promtool for the metrics' tests" scripts/install-promtool
    step "a Python older than Muri's own" scripts/install-old-python
    step "PyTorch for the GPU check" scripts/make-gpu-check-venv 3.11
}

# Tests on a real Slurm mostly wait, so what mostly computes runs beside them: both take little longer than one alone.
beside_sandbox_tests() { # COMMAND…, with options of scripts/test-sandbox in $sandbox_options
    local began_s=$SECONDS sandbox
    scripts/test-sandbox "${sandbox_options[@]}" --junitxml=out/sandbox.xml >out/sandbox.log 2>&1 &
    sandbox=$!
    trap 'kill "$sandbox" 2>/dev/null' EXIT # a background job does not hear Ctrl-C
    "$@"
    printf '\n=== sandbox tests (a real Slurm), which ran beside that\n'
    wait "$sandbox" || failed+=("sandbox tests (a real Slurm)")
    trap - EXIT
    cat out/sandbox.log
    times+=("$(printf '%5d s  %s' $((SECONDS - began_s)) "both kinds of tests, side by side")")
}

end() { # NAME=FILE…, pytest's reports
    printf '\n'
    printf '%s\n' "${times[@]}"
    .venv/bin/python scripts/count_tests.py "$@" || failed+=("counting")
    ((${#failed[@]} == 0)) || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
}
