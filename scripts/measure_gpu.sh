#!/usr/bin/env bash
# Everything that is committed of a GPU, measured anew:
#
#     bash scripts/measure_gpu.sh bench/results/h200 [PART ...]
#
# Parts, in the order in which they run where none is named: bandwidth fused compiled eager prefill profile modes tests.
# Rows go to bench/results/h200-*.json as they come, traces and reports to bench/results/profile-h200. A command that
# fails, or takes longer than STEP_SECONDS (900), is named at the end; the others still run. PYTHON: .venv's if unset.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ $# -gt 0 ] || { echo "error: where rows go comes first: bash scripts/measure_gpu.sh bench/results/h200" >&2; exit 2; }
prefix=$1
shift
python=${PYTHON:-.venv/bin/python}
profiles=$(dirname "$prefix")/profile-$(basename "$prefix")
model=llama-3.1-8b
failed=()

step() {
    echo "+ $*" >&2
    timeout --signal=INT "${STEP_SECONDS:-900}" "$@" >&2 || failed+=("$* (status $?)")
}

bench() { # bench ROWS NAME OPTION...: rows of bench.NAME into PREFIX-ROWS.json
    local rows=$1 name=$2
    shift 2
    step "$python" -m "bench.$name" --append "$prefix-$rows.json" "$@"
}

bandwidth() { bench bandwidth bandwidth; }

fused() {
    bench decode decode --random $model --decoders fused --repetitions 5 --compile-times
    bench decode decode --random llama-3.2-1b --decoders fused --repetitions 7
    bench decode decode --random qwen3-0.6b --decoders fused --repetitions 7
    bench decode decode --random $model --decoders fused --quantize int8,fp8,int4-g128 --repetitions 5
    bench positions decode --random $model --decoders fused --positions 100,7000 --new-tokens 100 --max-seq-len 8192 \
        --repetitions 5
}

compiled() {
    bench decode decode --random $model --decoders compiled --compile-prefill --repetitions 5 --compile-times
    bench decode decode --random llama-3.2-1b --decoders compiled --repetitions 7
    bench decode decode --random $model --decoders compiled --batch 8 --repetitions 5
    local capacity
    for capacity in 512 8192; do
        bench positions decode --random $model --decoders compiled --positions 100 --new-tokens 100 \
            --max-seq-len $capacity --repetitions 5
    done
}

eager() { bench decode decode --random $model --decoders eager --repetitions 3; }

prefill() { bench prefill prefill --random $model --prompt-tokens 16,128,512,2048,8192 --repetitions 5; }

modes() { bench ablation ablation --random $model --repetitions 5 --compile-times; }

profile() {
    step "$python" generate.py --random $model --profile "$profiles"
    # The deliberately broken run of docs/traces.md: right if it says so, with status 1.
    "$python" -c 'import sys, torch._inductor.config as c
c.triton.cudagraph_trees = c.triton.cudagraph_support_input_mutation = False
import generate
sys.exit(generate.main(sys.argv[1:]))' --random tiny --kernels inductor --allow-no-graphs --profile "$profiles/broken" >&2
    local status=$?
    [ $status = 1 ] || failed+=("the run without graphs ended with status $status, not 1")
}

tests() {
    step "$python" -m pytest -q -m gpu
    step env NEARROOF_MEMCHECK=1 "$python" -m pytest -q -m gpu -k memory_is_used_as_allowed
}

all=(bandwidth fused compiled eager prefill profile modes tests)
parts=("${@:-${all[@]}}")
for part in "${parts[@]}"; do
    case " ${all[*]} " in *" $part "*) ;; *) echo "error: no part is called $part" >&2 && exit 2 ;; esac
done
for part in "${parts[@]}"; do $part; done
for command in ${failed[@]:+"${failed[@]}"}; do echo "failed: $command" >&2; done
[ ${#failed[@]} = 0 ]
