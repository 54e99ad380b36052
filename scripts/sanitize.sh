#!/bin/sh
# sanitize.sh [test…]   Runs compute-sanitizer's four tools over dev/test_attention and ends with 1 if one finds anything.
# Default: the trainer's attention in both precisions, whole and in blocks; four minutes on an H200. A test is a part of
# its name, as for dev/test_attention.
if [ "$1" = --help ]; then
    sed -n '2,4s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.." || exit
if ! command -v compute-sanitizer >/dev/null; then
    echo "sanitize.sh: there is no compute-sanitizer; it comes with the CUDA Toolkit" >&2
    exit 1
fi
make dev/test_attention >/dev/null || exit
[ $# -gt 0 ] || set -- layer_flash_fp32 layer_flash_bf16 "flash_fp16x3 fp32 block" "flash_bf16_sm90 bf16 block"
found=0
for tool in memcheck racecheck initcheck synccheck; do
    for test in "$@"; do
        printf '%-10s %s: ' "$tool" "$test"
        if said=$(compute-sanitizer --tool "$tool" --error-exitcode 1 ./dev/test_attention "$test" 2>&1); then
            echo "$said" | grep -E ' passed, | SUMMARY' | tr '\n' ' '
            echo
        else
            echo "FAILED"
            echo "$said" | tail -30
            found=1
        fi
    done
done
exit $found
