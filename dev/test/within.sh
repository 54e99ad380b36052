# . dev/test/within.sh   For scripts whose commands may hang.
#
# within SECONDS command…   Ends with the command's exit code, 124 or 137 if it had to be killed; says that then. What the
# command started and left behind is killed too, as it is after Ctrl-C, so each command has a process group of its own.
groups=$(mktemp -d)
trap 'rm -rf "$groups"' EXIT
# What runs in the background ignores Ctrl-C, which some tests send.
hear=$(env --default-signal=INT true 2>/dev/null && echo env --default-signal=INT)

within() {
    seconds=$(($1 * ${TEST_PATIENCE:-1})); shift
    timeout -k 10 "$seconds" $hear "$@" &
    group=$! code=0
    touch "$groups/$group"
    wait "$group" || code=$?
    kill -s KILL -- "-$group" 2>/dev/null
    rm -f "$groups/$group"
    case $code in 124 | 137) echo "$*: no end after $seconds s, or killed" ;; esac
    return $code
}
end_all() {  # exit code
    trap "" TERM INT
    for group in "$groups"/*; do kill -s KILL -- "-${group##*/}" 2>/dev/null; done
    wait
    exit "$1"
}
trap 'end_all 130' INT
trap 'end_all 143' TERM
