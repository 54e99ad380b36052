#!/bin/sh
# run_tests.sh "command that compiles for all architectures" program...   (a program that ends in .py is run by python3)
# Runs them all whatever fails, and ends in one line: N passed, N failed, N skipped.
archs=$1; shift
passed=0 failed=0 skipped=0
for program in "$@"; do
    echo "== $program"
    out=$(mktemp)
    case $program in
    *.py) command -v python3 >/dev/null || { echo "skipped: no python3"; skipped=$((skipped + 1)); rm "$out"; continue; }
        python3 "$program" >"$out" 2>&1 ;;
    *) ./"$program" >"$out" 2>&1 ;;
    esac
    code=$?
    cat "$out"
    # The program's own last line; one that dies before it counts as a failure.
    counts=$(tail -n 1 "$out" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p')
    rm -f "$out"
    case $code,$counts in
    0,*) ;;
    *,*" 0 "*) counts= ;;  # says that nothing failed, but did not end well
    esac
    if [ -z "$counts" ]; then
        echo "$program ended with code $code and no result"
        failed=$((failed + 1))
    else
        set_counts() { passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3)); }
        set_counts $counts
    fi
done
echo "== every kernel for every architecture, no warnings, no spills in attention"
if $archs; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
