#!/bin/sh
# sanitize.sh [test…]   Runs compute-sanitizer's four tools over dev/test_attention, in parallel,
# because most of the time is spent on the host. Fails if one finds anything. A test is named by a
# part of its name. Default: attention in both precisions, whole and in pieces, two minutes on an
# H200.
if [ "$1" = --help ]; then
    sed -n '2,5s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.." || exit
make dev/test_attention >/dev/null || exit

if [ $# -eq 0 ]; then
    set -- "flash_fp16x3 fp32 pieces" "flash_bf16_sm90 bf16 pieces" "flash_wgmma bf16 pieces" \
        "flash_fp16x3 fp32 few" "flash_wgmma bf16 few" \
        "flash_bf16_sm90 bf16 few" "flash_bf16_sm90 bf16 large"
fi
for test in "$@"; do
    for tool in memcheck racecheck initcheck synccheck; do
        case "$tool $test" in
        racecheck*pieces) ;;  # would take too long
        *) printf '%s\n' "$tool" "$test" ;;
        esac
    done
done | xargs -d '\n' -n 2 -P 4 sh -c '
    tool=$0
    test=$1
    if said=$(compute-sanitizer --tool "$tool" --error-exitcode 1 ./dev/test_attention "$test" 2>&1)
    then
        summary=$(echo "$said" | grep -E " passed, | SUMMARY" | tr "\n" " ")
        printf "%-10s %s: %s\n" "$tool" "$test" "$summary"
    else
        printf "%-10s %s: FAILED\n%s\n" "$tool" "$test" "$(echo "$said" | tail -30)"
        exit 1
    fi'
