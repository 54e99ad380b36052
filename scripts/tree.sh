#!/bin/sh
# Prints "COMMIT clean" or "COMMIT dirty": which sources these are, for the rows of dev/results. A
# changed text or result does not count. If the sources were copied without .git, COMMIT=… names
# them. If git cannot tell, because it is missing or refuses another user's repository, prints
# "unknown dirty".
cd "$(dirname "$0")/.." || exit
# A git hook sets these to its own repository, and without a complete .git here git would search the
# folders above.
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_COMMON_DIR GIT_OBJECT_DIRECTORY GIT_NAMESPACE
GIT_CEILING_DIRECTORIES=$(dirname "$(pwd -P)")
export GIT_CEILING_DIRECTORIES

changed_sources() {
    git status --porcelain --untracked-files=normal -- . ':!*.md' ':!dev/results' 2>/dev/null
}

state=clean
if [ -e .git ]; then
    COMMIT=$(git rev-parse --verify --short=12 HEAD 2>/dev/null)
    if ! changed=$(changed_sources) || [ -n "$changed" ]; then
        state=dirty
    fi
fi
if [ -z "$COMMIT" ]; then
    COMMIT=unknown
    state=dirty
fi
echo "$COMMIT $state"
