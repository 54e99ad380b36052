#!/bin/sh
# sanitize.sh [test…]   Runs compute-sanitizer's four tools over dev/test_attention, side by side, because most of their time
# is the host's. Fails if one finds anything. Default: attention in both precisions, whole and in pieces, two minutes on an
# H200. A test is a part of its name.
if [ "$1" = --help ]; then
    sed -n '2,4s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.." || exit
make dev/test_attention >/dev/null || exit
[ $# -gt 0 ] || set -- "flash_fp16x3 fp32 pieces" "flash_bf16_sm90 bf16 pieces" "flash_fp16x3 fp32 few" \
    "flash_bf16_sm90 bf16 few" "flash_bf16_sm90 bf16 large"
for test in "$@"; do
    for tool in memcheck racecheck initcheck synccheck; do
        case "$tool $test" in racecheck*pieces) ;; *) printf '%s\n' "$tool" "$test" ;; esac  # which would take too long
    done
done | xargs -d '\n' -n 2 -P 4 sh -c '
    if said=$(compute-sanitizer --tool "$0" --error-exitcode 1 ./dev/test_attention "$1" 2>&1); then
        printf "%-10s %s: %s\n" "$0" "$1" "$(echo "$said" | grep -E " passed, | SUMMARY" | tr "\n" " ")"
    else
        printf "%-10s %s: FAILED\n%s\n" "$0" "$1" "$(echo "$said" | tail -30)"
        exit 1
    fi'
