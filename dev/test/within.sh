# . dev/test/within.sh   For scripts whose commands may hang.
#
# within SECONDS command…   Runs a command and returns its exit code, or 124 or 137 if it had to be
# killed. Then it also prints a line that says so. TEST_PATIENCE multiplies the seconds.
#
# Each command has a process group of its own. What the command started is killed with it, and at
# Ctrl-C or SIGTERM all that still runs.

# A folder that is removed at exit, for the scripts' logs, too.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
groups=$scratch/groups  # has a file for each group that runs, named by its number
mkdir "$groups"
# A shell lets its background processes ignore Ctrl-C, which some tests send. env can undo that,
# unless it is old.
default_interrupt=$(env --default-signal=INT true 2>/dev/null && echo env --default-signal=INT)

within() {
    seconds=$(($1 * ${TEST_PATIENCE:-1}))
    shift
    timeout -k 10 "$seconds" $default_interrupt "$@" &
    group=$!  # timeout makes itself the leader of a group
    touch "$groups/$group"

    code=0
    wait "$group" || code=$?
    kill -s KILL -- "-$group" 2>/dev/null
    rm -f "$groups/$group"
    case $code in
    124 | 137) echo "$*: did not end within $seconds s, or was killed" ;;
    esac
    return $code
}

end_all() {  # exit code
    trap "" TERM INT
    for group in "$groups"/*; do
        kill -s KILL -- "-${group##*/}" 2>/dev/null
    done
    wait
    exit "$1"
}
trap 'end_all 130' INT
trap 'end_all 143' TERM
