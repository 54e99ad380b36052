#!/bin/sh
# Prints "COMMIT clean" or "COMMIT dirty": which sources are here, for the rows of dev/results. A changed text or result does
# not count. Where the sources were copied without .git, COMMIT=… says which they are.
cd "$(dirname "$0")/.."
state=clean
if [ -e .git ]; then
    COMMIT=$(git rev-parse --short=12 HEAD)
    changed=$(git status --porcelain -- . ':!*.md' ':!dev/results') && [ -z "$changed" ] || state=dirty
elif [ -z "$COMMIT" ]; then
    COMMIT=unknown state=dirty
fi
echo "$COMMIT $state"
