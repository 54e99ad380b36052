#!/bin/sh
# tree.sh         Prints "COMMIT clean" or "COMMIT dirty": which sources are here, for the rows of dev/results.
# tree.sh --sum   Prints the checksum of the last commit's sources.
#
# Where the sources were copied without .git, COMMIT=… and TREE=… say what these two printed; without TREE it is dirty.
set -e
cd "$(dirname "$0")/.."
sum() {  # of all that is compiled or run here; what is measured and written does not change what is measured
    find Makefile train_gpt2.cu attention data dev layers run scripts \( -path data/cache -o -path dev/results \) -prune -o \
        -type f -print | grep -E '(\.(cu|cuh|cpp|h|py|sh|txt)|Makefile)$' | LC_ALL=C sort |
        xargs sha256sum | sha256sum | cut -c 1-16
}
if [ -e .git ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    git archive HEAD | tar -x -C "$folder"
    COMMIT=$(git rev-parse --short=12 HEAD) TREE=$(cd "$folder" && sum)
fi
if [ "$1" = --sum ]; then
    echo "$TREE"
elif [ "$TREE" = "$(sum)" ]; then
    echo "$COMMIT clean"
else
    echo "${COMMIT:-unknown} dirty"
fi
