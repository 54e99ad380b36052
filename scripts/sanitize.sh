#!/bin/sh
# sanitize.sh [test…]   Runs compute-sanitizer's four tools over dev/test_attention and ends with 1 if one finds anything.
# Default: attention in both precisions, whole and in pieces, two minutes on an H200. A test is a part of its name.
if [ "$1" = --help ]; then
    sed -n '2,3s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.." || exit
make dev/test_attention >/dev/null || exit
trap 'trap "" TERM; kill 0; exit 130' INT  # what runs in the background ignores Ctrl-C

check() {  # tool, test
    if said=$(compute-sanitizer --tool "$1" --error-exitcode 1 ./dev/test_attention "$2" 2>&1); then
        printf '%-10s %s: %s\n' "$1" "$2" "$(echo "$said" | grep -E ' passed, | SUMMARY' | tr '\n' ' ')"
    else
        printf '%-10s %s: FAILED\n%s\n' "$1" "$2" "$(echo "$said" | tail -30)"
        return 1
    fi
}
found=0
check_all() {  # test, tool…   side by side: most of their time is the host's
    test=$1 jobs=; shift
    for tool in "$@"; do
        check "$tool" "$test" &
        jobs="$jobs $!"
    done
    for job in $jobs; do
        wait "$job" || found=1
    done
}
if [ $# -eq 0 ]; then
    for kernel in "flash_fp16x3 fp32" "flash_bf16_sm90 bf16"; do  # racecheck takes too long for these: "few"
        check_all "$kernel pieces" memcheck initcheck synccheck
    done
    set -- "flash_fp16x3 fp32 few" "flash_bf16_sm90 bf16 few" "flash_bf16_sm90 bf16 large"
fi
for test in "$@"; do
    check_all "$test" memcheck racecheck initcheck synccheck
done
exit $found
