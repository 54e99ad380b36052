#!/bin/sh
# Prints "COMMIT clean" or "COMMIT dirty": which sources are here, for the rows of dev/results. A
# changed text or result does not count. Where the sources were copied without .git, COMMIT=… says
# which they are. What git cannot tell, because it is missing or refuses a repository of another user,
# is "unknown dirty".
cd "$(dirname "$0")/.." || exit
# A hook has these set to its own repository, and without a whole .git here git would look in the
# folders above.
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_COMMON_DIR GIT_OBJECT_DIRECTORY GIT_NAMESPACE
export GIT_CEILING_DIRECTORIES="$(dirname "$(pwd -P)")"
state=clean
if [ -e .git ]; then
    COMMIT=$(git rev-parse --verify --short=12 HEAD 2>/dev/null)
    changed=$(git status --porcelain --untracked-files=normal -- . ':!*.md' ':!dev/results' 2>/dev/null) &&
        [ -z "$changed" ] || state=dirty
fi
if [ -z "$COMMIT" ]; then
    COMMIT=unknown state=dirty
fi
echo "$COMMIT $state"
