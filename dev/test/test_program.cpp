// Tests the program as its users run it: ./train_gpt2cu is a subprocess, whose output, exit code
// and files are checked. Most tests use --device cpu, so that the loop, data, checkpoints, resume,
// sampling and errors are tested on any machine.
#include <fcntl.h>
#include <sys/stat.h>

#include <csignal>
#include <set>

#include "cuda/cuda.h"
#include "data/loader.h"
#include "data/text.h"
#include "dev/test/processes.h"
#include "dev/test/program.h"
#include "run/checkpoint_files.h"
#include "run/log.h"

namespace {

// A model that has taken one step.
const std::string& model() {
    static const std::string out = dir() + "/model";
    static const std::string path = model_path(out, 1);
    if (!exists(path))
        CHECK_RUN(run(tiny() + "-x 1 -o " + out), 0, "checkpoint");
    return path;
}

struct Command {
    int code;
    std::string arguments;
    std::string says;
};

// Checks each command's exit code and a part of its output. An error must be one line and the last
// of the output, except that ranks print their own.
void check_commands(const std::vector<Command>& commands) {
    for (const Command& c : commands) {
        const int failed = test::failed_checks();
        const Result r = run(c.arguments);
        const std::string error = text_from(r.out, "train_gpt2cu:");
        if (c.code == 0)
            CHECK_RUN(r, 0, c.says);
        else
            CHECK_RUN((Result{r.code, error}), c.code, c.says);
        if (!contains(c.arguments, "--gpus"))
            CHECK(std::count(error.begin(), error.end(), '\n') == (c.code == 0 ? 0 : 1));
        if (test::failed_checks() > failed)
            std::printf("  by ./train_gpt2cu %s\n", c.arguments.c_str());
    }
}

// Options of runs with small steps, which tests of several ranks start from.
std::string small_steps(const std::string& device) {
    return "--device " + device + " -e tiny -b 1 -t 32 -d 128 -s 0 -i " + text_file() + " -j " +
           text_file() + " ";
}
const std::string kCpuSteps = small_steps("cpu") + "-k constant -u 0 ";
const std::string kGpuSteps = small_steps("cuda") + "-k constant -u 6 -l 1e-3 ";

void need_gpu() {
    if (Cuda::count() == 0)
        SKIP("no GPU");
}

// How many GPUs to use, 2 or 4.
int several_gpus() {
    const int gpus = Cuda::count();
    if (gpus < 2)
        SKIP("%d GPUs", gpus);
    return gpus < 4 ? 2 : 4;
}

// The largest relative difference between the `count` losses of this kind that two runs logged in
// their folders. NaN, which is near nothing, if they logged more or fewer.
double largest_difference(const std::string& out, const std::string& other, const char* kind,
                          size_t count) {
    const std::vector<double> a = values(out, kind, "loss_nats");
    const std::vector<double> b = values(other, kind, "loss_nats");
    if (a.size() != count || b.size() != count)
        return NAN;
    double largest = 0;
    for (size_t i = 0; i < count; i++) {
        const double difference = std::fabs(a[i] - b[i]) / b[i];
        if (std::isnan(difference))
            return NAN;
        largest = std::max(largest, difference);
    }
    return largest;
}

// A shell prefix that makes the following program rank `rank` of `size`.
std::string as_rank(int rank, int size, int port) {
    return format("MASTER_ADDR=127.0.0.1 MASTER_PORT=%d RANK=%d WORLD_SIZE=%d ", port, rank, size);
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Options

namespace {

// What the program makes of arguments: the options that no longer have their defaults, or what is
// wrong.
std::string parsed(const std::vector<std::string>& arguments) {
    Options o;
    Options fresh;
    try {
        o = options_of(arguments);
    } catch (const UsageError& e) {
        return e.what();
    }
    std::istringstream lines(options_changed(o.table(), fresh.table()));
    std::string changed;
    for (std::string line; std::getline(lines, line);) {
        const size_t title_width = 17;
        changed += line.substr(std::min(line.size(), title_width));
    }
    return changed;
}

void check_begins(const std::string& text, const std::string& begin) {
    if (text.compare(0, begin.size(), begin))
        test::report(__FILE__, __LINE__,
                     format("expected \"%s\", got \"%s\"", begin.c_str(), text.c_str()));
}

}  // namespace

TEST(arguments_set_options) {
    const struct {
        std::vector<std::string> arguments;
        std::string changed;
    } cases[] = {
        {{}, ""},
        {{"--no-shuffle=1", "-a", "0"}, "  --no-shuffle"},
        {{"-a", "-b", "7"}, "  --batch 7  --overfit"},  // a flag takes 0 or 1, and no option
        {{"--train-data=runs/lr=1e-3.bin"}, "  --train-data 'runs/lr=1e-3.bin'"},
        {{"--train-data=--batch"}, "  --train-data --batch"},  // else it looks like an option
        {{"--prompt", "a b=c"}, "  --prompt 'a b=c'"},
        {{"--prompt", ""}, ""},
        {{"-b", "8", "--help", "--nonsense"}, "  --batch 8"},  // --help ends the arguments
        {{"-q", "1", "--beta2=0.99999"}, "  --final-lr 1  --beta2 0.99999"},  // the ends of ranges
        {{"-l", "0e-999"}, "  --lr 0"},
        {{"-c", "1e-30", "-q", "0.0e-400"}, "  --final-lr 0  --weight-decay 1e-30"},
        {{"-m", "-1"}, "  --val-batches -1"},
        // what users of llm.c write
        {{"-v", "0", "-s", "0", "-x", "-1", "-n", "0", "-nk", "0", "-nm", "0", "-y", "0"},
         "  --val-every 0  --sample-every 0"},
        {{"-v", "-1", "-s", "-1", "-z", "1", "-r", "1"}, "  --zero 1"}};
    for (const auto& [arguments, changed] : cases) {
        const std::string found = parsed(arguments);
        if (found != changed)
            test::report(__FILE__, __LINE__,
                         format("expected \"%s\", got \"%s\"", changed.c_str(), found.c_str()));
    }
}

TEST(each_option_has_its_own_value) {
    Options o;
    const std::vector<Option> table = o.table();
    std::set<void*> values;
    for (const Option& option : table)
        values.insert(option.value);
    CHECK(values.size() == table.size());
}

TEST(wrong_arguments_are_named) {
    const struct {
        std::vector<std::string> arguments;
        std::string error;  // how it begins
    } cases[] = {{{"-i", "x", "--train-data="}, "--train-data (-i) is given twice"},
                 {{"-a", "data.bin"}, "unknown option data.bin"},
                 {{"-b"}, "--batch (-b) needs a value"},
                 {{"-i", "--batch=3", "3"}, "--train-data (-i) needs a value"},
                 {{"-i", "-nk", "3"}, "--train-data (-i) needs a value"},
                 {{"--eval-only=yes"}, "--eval-only: \"yes\""},
                 {{"--device", "cu"}, "--device: \"cu\" is not one of auto|cuda|cpu"}};
    for (const auto& [arguments, error] : cases)
        check_begins(parsed(arguments), error);
    for (const char* path : {"-i", "-j", "-e", "-o", "--hellaswag", "--tokenizer"})
        CHECK(contains(parsed({path, ""}), "path"));
}

// A word that names a file may come from a pattern that the shell expanded, so it gets one more
// hint.
TEST(unknown_options_get_hints) {
    const std::string hint = "see --help (llm.c's options: FROM_LLMC.md)";
    const std::string quotes = ", and put a pattern of file names in quotes";
    for (const std::string name : {"--bat", "-9", "no_such_file.bin", ""})
        CHECK(parsed({"-i", "LICENSE", name}) == "unknown option " + name + "; " + hint);
    CHECK(parsed({"-i", "LICENSE", "README.md"}) == "unknown option README.md; " + hint + quotes);
}

// A value that stands for a default inside the program is no value that a user can give.
TEST(values_out_of_range_are_named) {
    const struct {
        const char* option;
        const char* value;
        std::string title;
        std::string range = "";
    } cases[] = {{"-b", "99999999999999999999", "--batch (-b)", "1..65536"},
                 {"-b", "0", "--batch (-b)", "1..65536"},
                 {"-t", "0", "--tokens (-t)"},
                 {"-d", "0", "--tokens-per-step (-d)"},
                 {"-u", "-1", "--warmup (-u)"},
                 {"-m", "0", "--val-batches (-m)", "-1 or 1.."},
                 {"-m", "-2", "--val-batches (-m)", "-1 or 1.."},
                 {"-r", "3", "--recompute (-r)", "0..2"},
                 {"-z", "-1", "--zero (-z)"},
                 {"--gpus", "0", "--gpus"},
                 {"--overlap", "-1", "--overlap"},
                 {"--generate", "0", "--generate"},
                 {"--profile", "0", "--profile"},
                 {"-q", "1.00000001", "--final-lr (-q)", "0..1"},  // which is 1 as a float
                 {"-q", "-1e-8", "--final-lr (-q)", "0..1"},
                 {"-l", "-1", "--lr (-l)"},
                 {"-l", "-0.5", "--lr (-l)"}};
    for (const auto& c : cases) {
        const std::string error = parsed({c.option, c.value});
        check_begins(error, c.title + ": \"" + c.value + "\" is out of range");
        CHECK(contains(error, c.range));
    }
}

TEST(values_that_are_no_numbers_are_named) {
    for (const char* value : {"", "x", "3x", " 3", "3.5", "1e3", "0x10", "+3", "-"})
        check_begins(parsed({"-b", value}),
                     format("--batch (-b): \"%s\" is not an integer", value));
    for (const char* value : {"", "nan", "-nan", "inf", "1e99", "0.1f", " 0.1", "0,1", "lr"})
        check_begins(parsed({"-l", value}), format("--lr (-l): \"%s\" is not a finite", value));
}

TEST(values_that_would_become_0_are_named) {
    check_begins(parsed({"-l", "1e-400"}), "--lr (-l): \"1e-400\" is too small");
    check_begins(parsed({"--temperature", "1e-400"}), "--temperature: \"1e-400\" is too small");
    check_begins(parsed({"--max-norm", "1e-46"}),
                 "--max-norm: \"1e-46\" is too small");  // as a float
}

// No option that is given is ignored. The table says which modes use an option: t is training, p is
// --profile, e is --eval-only and g is --generate. --memory asks about a command that trains or
// generates, and takes the same options.
TEST(options_that_a_mode_would_ignore_are_named) {
    const std::pair<const char*, const char*> users[] = {
        {"tpeg", "--init --precision --attention --device --no-tf32 --tokens --seed --tokenizer"},
        {"tpe", "--val-data --gpus --context-parallel --timeout --batch --val-batches --hellaswag"},
        {"tpg", "--prompt --temperature --top-k"},
        {"tp", "--train-data --recompute --zero --overlap --tokens-per-step"},
        {"tp", "--no-shuffle --overfit"},
        {"tp", "--lr --warmup --final-lr --schedule --weight-decay --beta2 --max-norm"},
        {"tp", "--val-every --sample-every --sample-length"},
        {"tg", "--memory"},
        {"t", "--max-steps --output-dir --checkpoint-every --keep --keep-every --resume"},
        {"p", "--profile"},
        {"e", "--eval-only"},
        {"g", "--generate --samples"},
    };
    std::map<std::string, std::string> users_of;
    for (const auto& [modes, options] : users)
        for (const std::string& option : split(options, " "))
            users_of[option] = modes;

    for (const Option& tried : Options().table()) {
        if (!users_of.count(tried.name))
            continue;
        for (const char mode : std::string("tpeg")) {
            Options o;
            o.profile = mode == 'p';
            o.eval_only = mode == 'e';
            o.generate = mode == 'g';
            std::vector<Option> table = o.table();
            for (Option& option : table)
                option.given = option.name == std::string(tried.name);

            const std::string error = test::error_of([&] { check_all_are_used(o, table); });
            const bool is_used = contains(users_of.at(tried.name), std::string(1, mode));
            const bool is_right = is_used ? error.empty() : contains(error, title(tried));
            if (!is_right)
                test::report(__FILE__, __LINE__,
                             format("%s, %c: %s", tried.name, mode, error.c_str()));
        }
    }
}

// -------------------------------------------------------------------------------------------------
// The program

TEST(help_and_version) {
    const std::string newest =
        shell("sed -n 's/^## //p' CHANGELOG.md | head -n 1 | tr -d '\\n'").out;
    check_commands({{0, "-h", "usage: train_gpt2cu"},
                    {0, "--version", "train_gpt2cu " + newest},
                    {2, "-h 1", "train_gpt2cu: unknown option -h"},  // in llm.c, HellaSwag
                    {2, "--bat 4", "train_gpt2cu: unknown option --bat"}});
}

TEST(models_that_cannot_be_had_are_usage_errors) {
    check_commands({
        {2, tiny() + "-e gpt3:c768", "--init gpt3:c768"},
        {2, tiny() + "-e run", "--init run"},  // a folder without a run
        {2, tiny() + "--attention flash_simple", "--attention flash_simple"},
        {2, tiny() + "--precision bf16", "--precision bf16"},
    });
}

TEST(commands_that_lack_an_option_are_usage_errors) {
    check_commands({
        {2, "--device cpu --generate 5", "with -e"},
        {2, "--device cpu --eval-only -j " + text_file(), "with -e"},
        {2, "--device cpu --eval-only -e " + model() + " -i " + text_file(), "-j"},
        {2, tiny() + "-y 1", "-o"},
    });
}

TEST(values_that_no_option_takes_are_usage_errors) {
    check_commands({
        {2, tiny() + "-x 1 -o ''", "--output-dir (-o)"},
        {2, tiny() + "-x 1 --lr 1e-400", "--lr (-l)"},
        {2, "--device cpu --generate 0 -e " + model(), "--generate"},
    });
}

TEST(options_that_contradict_each_other_are_usage_errors) {
    const std::string with_model = "--device cpu -e " + model() + " ";
    const std::string evaluate = with_model + "--eval-only -j " + text_file() + " ";
    const std::string generate = with_model + "--generate 5 ";
    check_commands({
        {2, "--device auto --generate 5 -e x --gpus 2", "--gpus"},
        {2, "--device cpu --generate 5 -e x --eval-only", "--generate"},
        {2, tiny() + "--profile 1 -o x", "--output-dir (-o)"},
        {2, tiny() + "--profile 1 -x 9", "--max-steps (-x)"},
        {2, tiny() + "--profile 1 --memory", "--memory"},
        {2, tiny() + "-x 1 --samples 2", "--samples"},
        {2, evaluate + "--memory", "--memory"},
        {2, evaluate + "--profile 1", "--profile"},
        {2, evaluate + "-y -o " + dir() + "/evaluated", "--output-dir (-o), --resume (-y)"},
        {2, evaluate + "-x 1", "--max-steps (-x)"},
        {0, evaluate + "-y 0 -m 1 -b 1 -t 16", "val loss"},
        {2, generate + "--hellaswag x", "--hellaswag"},
        {2, generate + "-j x", "--val-data (-j)"},
        {2, generate + "--profile 1", "--profile"},
        {2, generate + "-b 2", "--batch (-b)"},
        {2, generate + "-o " + dir() + "/generated", "--output-dir (-o)"},
    });
    for (const char* never_made : {"/evaluated", "/generated"})
        CHECK(!exists(dir() + never_made));
}

// An int must be able to count a step's tokens, and a quarter of its range a micro-batch's.
TEST(sizes_that_do_not_fit_are_usage_errors) {
    const std::string memory = "--device cpu -e tiny --memory ";
    check_commands({
        {2, tiny() + "-d 100", "not a multiple"},
        {0, memory + "--gpus 4 -b 65535 -t 8192", ""},
        {2, memory + "--gpus 5 -b 65535 -t 8192", "too many tokens for a step"},
        {2, memory + "-b 65536 -t 8192", "too many tokens for a micro-batch"},
        {2, memory + "-b 65536 -t 4194304", "too many tokens for a micro-batch"},
    });
}

TEST(ranks_that_do_not_divide_the_work_are_usage_errors) {
    const std::string memory = kCpuSteps + "--memory ";
    check_commands({
        // three ranks do not divide 128 channels, so --zero is 0 by default and cannot be 1
        {0, memory + "--gpus 3 -d 96", ""},
        {2, memory + "--gpus 3 -d 96 --zero 1", "--zero 0"},
        {2, memory + "--gpus 3", "B·T·ranks"},
        {2, memory + "--gpus 4 --context-parallel 3", "--gpus 6"},
        {2, memory + "-t 36 --gpus 4 --context-parallel 4", "-t 32"},
        {2, memory + "--gpus 2 --context-parallel 2 --attention naive", "--attention flash"},
        {2, memory + "--gpus 2 --context-parallel 2 --hellaswag x", "--hellaswag"},
    });
}

TEST(launchers_that_do_not_fit_the_options_are_usage_errors) {
    const std::string program = "./train_gpt2cu --device cpu -i " + text_file();
    CHECK_RUN(shell(program + " --gpus 2"), 2, "leave out --gpus");
    CHECK_RUN(shell(as_rank(0, 3, 29999) + program + " --gpus 2"), 2, "3 ranks");
    CHECK_RUN(shell("RANK=1 WORLD_SIZE=3 " + program), 2, "MASTER_ADDR");
}

// A text needs only as many positions as it has tokens.
TEST(sequences_longer_than_the_model_are_refused) {
    check_commands({
        {1, tiny() + "-t 300 -e " + model(), "256 positions"},
        {0, tiny() + "-t 300 -x 1", "300 positions"},
        {0, "--device cpu --generate 2 -t 300 -e " + model(), ""},
    });
}

TEST(files_that_are_not_what_they_should_be_are_refused) {
    const std::string bad = dir() + "/bad.bin";
    const std::string pointer = dir() + "/pointer.txt";
    const std::string pipe = dir() + "/pipe";  // which would never answer
    write_file(bad, std::string(2000, 'x'));
    write_file(pointer, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n");
    mkfifo(pipe.c_str(), 0600);
    check_commands({
        {1, "--device cpu -e " + bad, "20240326"},
        {1, "--device cpu --eval-only -e " + model() + " --hellaswag " + text_file(), "20240522"},
        {1, tiny() + "-b 16384 -x 1", "16384"},
    });
    for (const char* option : {"-i ", "-j ", "-e ", "--tokenizer ", "--hellaswag "})
        check_commands({
            {1, tiny() + "-x 1 " + option + pointer, pointer + ": is a Git LFS pointer"},
            {1, tiny() + "-x 1 " + option + pipe, pipe + ": is a pipe or a device"},
        });
}

TEST(output_directories) {
    const std::string earlier = dir() + "/earlier";
    std::filesystem::create_directory(earlier);
    write_file(earlier + "/log.jsonl", "{}\n");
    check_commands({
        {1, tiny() + "-x 1 -o " + text_file() + "/below_a_file", "below_a_file"},
        {0, tiny() + "-x 1 -o " + dir() + "/new/and/deep", "checkpoint"},
        {1, tiny() + "-x 1 -o " + earlier, earlier + ": already contains a run"},
    });
    CHECK(read_file(earlier + "/log.jsonl") == "{}\n");

    // of a run that was killed before its first row
    write_file(earlier + "/log.jsonl", "");
    CHECK_RUN(run(tiny() + "-x 1 -o " + earlier), 0, "checkpoint");

    // The newest checkpoint of a directory.
    model();
    CHECK_RUN(run("--device cpu --generate 2 -e " + dir() + "/model"), 0);
}

TEST(a_gpu_that_cannot_be_used) {
    const bool has_driver = exists("/dev/nvidiactl");
    if (Cuda::count() == 0)
        check_commands({{1, tiny() + "-x 1 --device cuda",
                         has_driver ? "use --device cpu" : "no NVIDIA driver"}});
    CHECK(contains(missing_kernels(90, false), "make ARCH=90a"));
    CHECK(!*missing_kernels(90, true));
    CHECK(!*missing_kernels(80, false));
}

// A stream that is closed does not become the log, and one that cannot be written does not go
// unnoticed.
TEST(standard_streams_may_be_closed_or_full) {
    const std::string out = dir() + "/closed";
    const std::string command = "./train_gpt2cu " + tiny() + "-x 2 ";
    CHECK_RUN(shell(command + "-o " + out + " <&- >&- 2>&-"), 0, "");
    CHECK(rows(out, "train").size() == 2);
    const std::string log = read_file(out + "/log.jsonl");
    CHECK(std::count(log.begin(), log.end(), '\n') == 3);

    for (const std::string& full : {command, std::string("./train_gpt2cu --help")})
        CHECK_RUN(shell(full + " >/dev/full"), 1, "train_gpt2cu: stdout: ");
}

// What a command prints into a pipe that is full at first, and that another program has made
// non-blocking for all.
static Result into_full_pipe(const std::string& arguments) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    CHECK(fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
    const std::string filling(fcntl(ends[1], F_SETPIPE_SZ, 4096), '.');
    CHECK(write(ends[1], filling.data(), filling.size()) == ssize_t(filling.size()));

    Processes process;
    process.start([&] {
        dup2(ends[1], STDOUT_FILENO);
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        execl("/bin/sh", "sh", "-c", ("exec " + command(arguments)).c_str(), nullptr);
        return 1;
    });
    close(ends[1]);
    sleep_for(0.5);  // the reader is slow

    std::string text;
    char part[1000];
    for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;)
        text.append(part, n);
    close(ends[0]);
    return {process.wait()[0], text.substr(std::min(filling.size(), text.size()))};
}
TEST(no_line_is_lost_in_a_pipe_that_does_not_block) {
    for (const std::string& arguments :
         {std::string("--help"), std::string("--nonsense")}) {  // stdout, stderr
        const Result expected = run(arguments);
        const Result found = into_full_pipe(arguments);
        CHECK(found.code == expected.code && found.out == expected.out);
    }
    CHECK_RUN(into_full_pipe(tiny() + "-x 3"), 0, "device  ", "step 1/3", "step 3/3",
              "nothing was saved");
}

TEST(texts_are_streamed) {
    const std::string generate =
        "--device cpu -e " + model() + " --generate 50 --prompt 'Twelve chars' ";
    const auto text = [&](const std::string& options) {
        return run(generate + "2>/dev/null " + options).out;
    };
    CHECK(text("--seed 3 --samples 2") == text("--seed 3") + "---\n" + text("--seed 4"));
    CHECK_RUN(run(generate + "-t 8"), 0, "Twelve chars", " tokens in ", " tokens/s\n");

    // texts without an end: a reader that has enough, and a full disk
    const std::string endless = generate + "--samples 1000000 ";
    const Result closed =
        shell("{ ./train_gpt2cu " + endless + "; echo code $? >&2; } | head -c 13");
    CHECK_RUN(closed, 0, "Twelve chars", "Broken pipe", "code 1\n");
    CHECK_RUN(run(endless + ">/dev/full"), 1, "No space left on device");
}

// As process 1 of a container, for which the kernel drops every signal that has no handler.
TEST(a_text_without_end_ends_by_a_signal_in_a_container) {
    const std::string in_container = "unshare --pid --fork --kill-child --map-root-user ";
    if (shell(in_container + "true").code)
        SKIP("unshare is not permitted here");
    const std::string endless = "--device cpu -e " + model() + " --generate 5 --samples 1000000";
    stop_ignoring_signals();
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
        // $(ranks) is the program, the child of unshare
        const std::string act = format("kill -%d $(ranks)", signal);
        CHECK_RUN(run_and_act(endless, "---", act, in_container), 128 + signal);
    }
}

namespace {

// What a command prints on a terminal.
std::string on_a_terminal(const std::string& command) {
    const int screen = posix_openpt(O_RDWR | O_NOCTTY);
    if (screen < 0 || grantpt(screen) || unlockpt(screen))
        SKIP("no terminal here");
    // Once nobody has the terminal open, a read fails instead of waiting for more. On some older
    // kernels it fails before all has been read. So this holds the terminal open until the first
    // read, which gets the few lines that a command prints. After that a failure is the end.
    const std::string terminal = ptsname(screen);
    const int held = open(terminal.c_str(), O_RDWR | O_NOCTTY);
    CHECK_RUN(shell(command + " 2>/dev/null >" + terminal), 0, "");

    std::string seen(1 << 16, '\0');
    ssize_t n = ::read(screen, seen.data(), seen.size());
    seen.resize(std::max<ssize_t>(0, n));
    close(held);
    char more[4096];
    while ((n = ::read(screen, more, sizeof more)) > 0)
        seen.append(more, n);
    close(screen);
    return seen;
}

}  // namespace

// A file or a pipe gets a text as it is. On a terminal it must not become a command to the
// terminal.
TEST(control_characters_reach_files_and_no_terminal) {
    const std::string text = "a\r\f\x1b[2J\x07\x7f\xC2\x9B\xFF\tz";
    const std::string bad = "\xEF\xBF\xBD";
    const std::string shown = "a" + bad + bad + bad + "[2J" + bad + bad + bad + bad + "\tz";
    const std::string prompt = " --temperature 0 --prompt " + shell_quoted(text);
    const std::string generate = "./train_gpt2cu --device cpu --generate 1 -e " + model();
    const std::string train = "./train_gpt2cu " + given_once(tiny() + "-x 1 -s 1 -g 1");
    const std::string file = dir() + "/printed";
    for (const std::string& command : {generate + prompt, train + prompt}) {
        CHECK(contains(shell(command).out, text));
        CHECK_RUN(shell(command + " >" + file), 0, "");
        CHECK(contains(read_file(file), text));

        const std::string seen = on_a_terminal(command);
        CHECK(contains(seen, shown));
        CHECK(!contains(seen, "\x1b"));
        CHECK(!contains(seen, "\f"));
    }
}

// The command that data/prepare.py prints runs on a CPU too, because the default model there, tiny,
// gets the vocabulary of the data.
TEST(a_tiny_model_has_the_vocabulary_of_its_data) {
    for (const auto& [token, vocabulary] : {std::pair{50255, "vocabulary 50257 (padded 50304)"},
                                            {256, "vocabulary 257 (padded 384)"}}) {
        const std::string data = write_shard(dir() + "/shard.bin", std::vector<int>(99, token));
        CHECK_RUN(
            run("--device cpu -b 1 -t 8 -x 1 -s 1 -g 1 -v 0 -i " + text_file() + " -j " + data), 0,
            vocabulary, "sample\n");
    }
    CHECK(vocabulary_of(text_file(), true) == 50257 && vocabulary_of(text_file(), false) == 257);
}

// --eval-only encodes a text with --tokenizer, after an <|endoftext|>.
TEST(evaluation_encodes_text_with_the_tokenizer) {
    // "zz" is not in the text, because write_shard() takes its id, 256, for <|endoftext|>
    const std::string tokenizer = write_tokenizer(dir() + "/pairs.bin", {"zz", "th", "he", "the"});
    const std::string text = "the other, the other, the other, the other";
    const std::string text_path = dir() + "/other.txt";
    write_file(text_path, text);
    std::vector<int> tokens = Tokenizer(tokenizer).encode(text, kGpt2Vocab, text_path);
    tokens.insert(tokens.begin(), kEndOfText);

    const auto loss = [](const std::string& data) {
        const Result r = run("--device cpu --eval-only -e tiny -t 8 -b 1 -j " + data);
        CHECK_RUN(r, 0, "val loss ");
        return text_from(r.out, "val loss ");
    };
    const std::string expected = loss(write_shard(dir() + "/encoded.bin", tokens));
    CHECK(loss(text_path + " --tokenizer " + tokenizer) == expected);
    CHECK(loss(text_path) != expected);  // of its bytes
}

// In a layer of d12 a token has 10·768 floats of qkv, atty, residual2, fch and residual3, four
// statistics of the layer norms, and 12 of lse. Outside the layers it has 2·768 + 2. The layer
// norms' outputs (768 each) and act (4·768) are kept for each layer, or once.
TEST(memory_of_activations_depends_on_recompute) {
    const char* qkvw = "qkvw       fp32      12       21233664 ";  // 3·768·768·12 elements
    for (const auto& [options, bytes_per_token] : {std::pair{"d12 -r 0", " 596744.0\n"},
                                                   {"gpt2:d12 -r 1", " 461576.0\n"},
                                                   {"gpt2:d12 -r 2", " 393992.0\n"}})
        CHECK_RUN(run(std::string("--device cpu --memory -e ") + options), 0, qkvw,
                  bytes_per_token);
    CHECK_RUN(run("--device cpu --generate 50 --memory -e " + model()), 0,
              "activations  qkv        fp32       4         393216 ");  // 256·3·128 each
}

// dev/test_gpt2 compares what is allocated. The moments are twice as large as the parameters.
TEST(the_memory_table_tells_what_a_run_needs) {
    const std::string table = run(tiny() + "--memory").out;
    const std::string described = run(tiny() + "-x 0").out;
    const double total = number_after(described, "\nmemory ");
    const double parameters = number_after(described, ": parameters ");
    CHECK(parameters > 2);
    CHECK_NEAR(number_after(table, "total, and activations per token "), total, 0.06);
    CHECK_NEAR(number_after(table, "host memory for checkpoints, with -o "), 3 * parameters, 0.2);
}

TEST(profile_ends_after_its_steps) {
    CHECK_RUN(run(tiny() + "--profile 2"), 0, "step 7/7 |");
}

// A run ends with the command that comes next, and it works.
TEST(a_run_says_what_it_does_and_what_is_next) {
    CHECK_RUN(run(tiny() + "-x 3 -a"), 0, "--tokens-per-step 128  --max-steps 3  --overfit\n",
              "--lr 0.002  --warmup 1\n", " tok/s\nnothing was saved; -o DIR");
    const std::string said = run(tiny() + "-x 1 -o " + dir() + "/says").out;
    CHECK_RUN(shell("eval '" + said.substr(said.rfind("next: ") + 6) + "'"), 0, "Once");
}

// Wherever the program is, and whatever its folder and the run's are called.
TEST(the_next_command_works_where_it_was_printed) {
    const std::string here = dir() + "/where it's $HOME";
    const std::string folder = "lr=1 $x";
    const std::string program = folder + "/it's \\ the\nprogram";
    std::filesystem::create_directories(here + "/" + folder);
    std::filesystem::create_directory(here + "/bin");
    const auto built = std::filesystem::absolute("train_gpt2cu");
    for (const std::string& link : {program, std::string("bin/gpt2")})
        std::filesystem::create_symlink(built, here + "/" + link);

    const std::pair<std::string, std::string> cases[] = {
        {"./" + program, "run"},   {program, "lr=1"},      {"gpt2", "found"},
        {"gpt2", "-run"},          {"gpt2", "-x"},         {"gpt2", "--lr=1"},
        {"gpt2", "tiny"},          {"gpt2", "two\nlines"}, {"gpt2", "$HOME `x` a b"},
        {"gpt2", "\\n'it\"s;|&*"},
    };
    const auto in_here = [&](const std::string& command) {
        return shell("export OMP_NUM_THREADS=1; cd " + shell_quoted(here) +
                     " && PATH=$PWD/bin:$PATH && " + command);
    };
    for (const auto& [called, out] : cases) {
        const std::string options = tiny() + "-x 1 --output-dir=" + shell_quoted(out);
        const std::string said = in_here(shell_quoted(called) + " " + options).out;
        const std::string many = "--generate 500";
        const std::string few = "--generate 5";  // takes less time
        const std::string sign = "\nnext: ";
        std::string next = text_from(said, sign);
        next.erase(0, sign.size());

        if (!contains(next, many)) {
            test::report(__FILE__, __LINE__, "there is no " + many + " in " + said);
            continue;
        }
        next.replace(next.find(many), many.size(), few);
        write_file(here + "/next.sh", next);
        CHECK_RUN(in_here("sh next.sh"), 0, "Once", " tokens/s");
    }
}

// On GPUs 10 steps and 10 resumed steps equal 20 straight ones in parameters, optimizer and
// position in the data. dev/test_resume has more, on the CPU.
TEST(resume_is_bit_exact_gpu) {
    need_gpu();
    for (const std::string precision : {"bf16", "fp32"}) {
        const std::string straight = dir() + "/straight_" + precision;
        const std::string resumed = dir() + "/resumed_" + precision;
        const std::string options = "-e tiny -b 2 -t 64 -d 256 -v 0 -s 0 -k constant -u 0 -i " +
                                    text_file() + " --precision " + precision + " -o ";
        CHECK_RUN(run(options + straight + " -x 20"), 0, "step 20/20");
        CHECK_RUN(run(options + resumed + " -x 10"), 0, "step 10/10");
        CHECK_RUN(run(options + resumed + " -x 20 -y 1"), 0, "resumed at step 10");
        for (const auto& path : {model_path, state_path}) {
            const std::string whole = read_file(path(straight, 20));
            CHECK(!whole.empty() && whole == read_file(path(resumed, 20)));
        }
    }
}

// Both interrupts come in the second step, the second one when a second has passed. On one thread
// that step computes for longer than 50 ms before the first and 50 ms after it, however fast the
// machine is.
TEST(a_second_interrupt_a_second_later_ends_the_step) {
    const std::string out = dir() + "/second";
    const std::string interrupts = R"(
        used() { cut -d' ' -f14 /proc/$pid/stat; }  # in hundredths of a second
        compute() {
            end=$(($(used) + 5))
            while [ $(used) -lt $end ]; do
                kill -s CONT $pid
                sleep 0.001
                kill -s STOP $pid
            done
        }
        compute
        kill -s INT $pid
        compute
        sleep 1.2
        kill -s INT $pid)";
    stop_ignoring_signals();
    setenv("OMP_THREAD_LIMIT", "1", 1);
    const Result r = run_and_act(
        "--device cpu -e tiny -b 64 -t 256 -v 0 -s 0 -x 9 -i " + text_file() + " -o " + out,
        "step 1/", interrupts);
    unsetenv("OMP_THREAD_LIMIT");
    CHECK(r.code == 128 + SIGINT);
    CHECK(!contains(r.out, "interrupted at step"));
    CHECK(newest_model(out) == -1);
}

// -------------------------------------------------------------------------------------------------
// Several ranks are threads on the CPU (dev/train_threads), and GPUs if there are at least two.
// dev/test_recipe compares what CPU ranks compute with fp64. Here their losses are compared with
// one rank's, and only where another number of ranks resumes a run.

namespace {

// The ways to divide a run among two GPUs, and the same among four if they are there. Either GPUs
// share sequences, or each has its own.
std::vector<std::string> ways_to_divide(bool share_sequences, bool fp32, int gpus) {
    std::vector<std::string> groupings;
    if (share_sequences)
        groupings = {"--context-parallel 2"};
    else if (fp32)
        groupings = {"--zero 0 --overlap 1", "--zero 1 --overlap 0", "--zero 0 --overlap 0",
                     "--zero 1 --overlap 1"};
    else
        groupings = {"--zero 0 --overlap 1", "--zero 1 --overlap 0"};

    std::vector<std::string> ways;
    for (const std::string& grouping : groupings)
        ways.push_back("--gpus 2 " + grouping);
    if (gpus < 4)
        return ways;

    for (const std::string& grouping : groupings)
        ways.push_back("--gpus 4 " + grouping);
    if (share_sequences)
        ways.push_back("--gpus 4 --context-parallel 4");
    return ways;
}

// Trains on one GPU and in each of these ways, and compares the losses. In bf16 a tiny model's
// losses diverge soon after any difference. If sequences are shared, they may do so by no more than
// with another seed.
void check_train_as_one(bool share_sequences, bool fp32, int gpus) {
    const std::string command = kGpuSteps + (share_sequences ? "-b 2 -t 256 -d 1024" : "") +
                                " -x 20 -v 10 -m 5 --precision " +
                                (fp32 ? "fp32 --no-tf32 " : "bf16 ");
    const std::string one = dir() + format("/gpu_%d_%d", share_sequences, fp32);
    const std::string other_seed = one + "_seed";
    CHECK_RUN(run(command + "-o " + one), 0, "step 20/20");
    if (share_sequences)
        CHECK_RUN(run(command + "--seed 2 -o " + other_seed), 0, "step 20/20");
    const auto tolerance = [&](const char* kind, size_t count) {
        if (fp32)
            return 1e-3;
        return share_sequences ? largest_difference(other_seed, one, kind, count) : 2e-2;
    };

    int number = 0;
    for (const std::string& way : ways_to_divide(share_sequences, fp32, gpus)) {
        const std::string several = one + format("_%d", number++);
        CHECK_RUN(run(command + way + " -o " + several), 0, "step 20/20");
        for (const auto& [kind, count] : {std::pair<const char*, size_t>{"train", 20}, {"val", 3}})
            CHECK_NEAR(largest_difference(several, one, kind, count), 0, tolerance(kind, count));
    }
}

}  // namespace

TEST(gpus_train_as_one) {
    const int gpus = several_gpus();
    for (const bool fp32 : {true, false})
        check_train_as_one(/*share_sequences=*/false, fp32, gpus);
}
TEST(gpus_that_share_sequences_train_as_one) {
    const int gpus = several_gpus();
    for (const bool fp32 : {true, false})
        check_train_as_one(/*share_sequences=*/true, fp32, gpus);
}

// Saves on `most` ranks and resumes on one, then on two. The losses must equal those of one rank
// that never stopped. Returns the folder of the run that stopped.
static std::string check_regrouped(const std::string& name, const std::string& options, int most,
                                   double tolerance) {
    const std::string straight = dir() + "/one_rank_" + name;
    const std::string out = dir() + "/regrouped_" + name;
    CHECK_RUN(run(options + "-v 0 -x 12 -o " + straight), 0, "step 12/12");
    CHECK_RUN(run(options + format("-v 0 -x 4 --gpus %d -o ", most) + out), 0, "--zero 1");
    CHECK_RUN(run(options + "-v 0 -x 8 -y 1 -o " + out), 0, "resumed at step 4");
    CHECK_RUN(run(options + "-v 0 -x 12 -y 1 --gpus 2 -o " + out), 0, "resumed at step 8");
    CHECK_NEAR(largest_difference(out, straight, "train", 12), 0, tolerance);
    return out;
}
TEST(checkpoints_do_not_depend_on_the_number_of_ranks) {
    const std::string out = check_regrouped("cpu", kCpuSteps, 4, 1e-4);
    CHECK_RUN(run("--device cpu --generate 5 -e " + model_path(out, 12)), 0, "");
}
TEST(checkpoints_do_not_depend_on_the_number_of_gpus) {
    check_regrouped("gpu", kGpuSteps + "--precision bf16 ", several_gpus(), 2e-2);
}

// Something is done to the parent or to a rank of a job without an end. Whatever it is, no process
// is left. Resuming takes as long as a job, so only one job that was killed and one that was told
// to end are resumed.
TEST(a_job_ends_as_a_whole) {
    const int gpus = several_gpus();
    const struct {
        const char* options;
        const char* act;
        int code;
        const char* says;
        bool resumes = false;
    } cases[] = {
        {"-n 1 -nk 3", "kill -9 $(ranks | head -n 1)", 137, "train_gpt2cu: rank 0 (pid ", true},
        {"-n 1 -nk 3", "kill -9 $(ranks | tail -n 1)", 137, ") was killed by signal 9"},
        {"-n 1 -nk 3 --timeout 8", "kill -STOP $(ranks | tail -n 1)", 1, ": no progress for 8 s"},
        {"", "kill -s TERM $pid", 143, "\ncheckpoint ", true},
        {"", "kill -s TERM $(ranks | tail -n 1)", 143, "\ncheckpoint "},
    };
    int n = 0;
    for (const auto& c : cases) {
        const int failed = test::failed_checks();
        const std::string out = dir() + format("/job_%d", ++n);
        const std::string options = kGpuSteps + "-v 0 -o " + out;
        CHECK_RUN(run_and_act(options + format(" -x 1000000 --gpus %d ", gpus) + c.options,
                              "step 5/", c.act),
                  c.code, c.says);
        CHECK(shell("pgrep -f 'gpt2c[u].*" + out + "'").out.empty());
        const int step = newest_model(out);
        CHECK(step > 0);
        if (c.resumes)
            CHECK_RUN(run(options + format(" -x %d -y", step + 1)), 0,
                      format("resumed at step %d\n", step));
        if (test::failed_checks() > failed)
            std::printf("  in case %d: %s, %s\n", n, c.options, c.act);
    }
}

// Two ranks that no parent watches share one GPU. NCCL refuses that on one machine, so it is told
// that they are on two. A signal to one stops both at the same step. If one dies, the other gives
// up.
TEST(ranks_by_hand) {
    need_gpu();
    const struct {
        const char* signal;
        int first;   // exit code of rank 0, which gets no signal
        int second;  // exit code of rank 1, which gets it
        const char* says;
    } cases[] = {{"TERM", 128 + SIGTERM, 128 + SIGTERM, "checkpoint "},
                 {"KILL", 1, 128 + SIGKILL, "rank 0 at step"}};
    for (const auto& [signal, first, second, says] : cases) {
        const int port = free_port();
        const std::string out = dir() + "/by_hand_" + signal;
        const std::string options = kGpuSteps + "-v 0 -o " + out;
        const std::string wait_for_step_5 =
            "while ! grep -qs '\"step\": 5,' " + out + "/log.jsonl; do sleep 0.1; done; ";
        std::string start_both;
        for (const int rank : {0, 1})
            start_both += as_rank(rank, 2, port) +
                          format("CUDA_VISIBLE_DEVICES=0 NCCL_HOSTID=%d ./train_gpt2cu ", rank) +
                          given_once(options + " -x 1000000 --timeout 8") + "& ";

        // job %1 is rank 0, and $! is the pid of rank 1, which was started last
        const Result r = shell(start_both + wait_for_step_5 + "kill -s " + signal +
                               " $!; wait %1; echo first $?; wait $!");
        CHECK_RUN(r, second, format("first %d\n", first), says);
    }
}

// dev/test_launch has what ranks say to each other, and dev/test_faults differences in the data.
TEST(ranks_that_differ_are_refused) {
    need_gpu();
    const std::string changed = dir() + "/changed";
    const std::string options = " " + small_steps("cuda") + "-v 0 -x 2 ";
    std::filesystem::copy_file("train_gpt2cu", changed);
    std::ofstream(changed, std::ios::app) << "x";
    for (const auto& [second, what] : {std::pair{changed + options, "program: rank 1"},
                                       {"./train_gpt2cu" + options + "-l 0.5", "--lr: rank 1"}}) {
        const int port = free_port();
        CHECK_RUN(shell(as_rank(0, 2, port) + "./train_gpt2cu" + options + " & " +
                        as_rank(1, 2, port) + second + "; echo one $?; wait $!; echo zero $?"),
                  0, "one 1", "zero 1", what);
    }
}

// -------------------------------------------------------------------------------------------------
// The floor of a validation loss

// The floor shown is the entropy of the built-in corpus's validation part, which dev/test_corpus
// recomputes. In 40 steps a model gets from ln 257 = 5.55 to where it knows the letters'
// frequencies, nowhere near the floor.
TEST(default_corpus_without_gpu_shows_its_floor) {
    const Corpus& corpus = builtin_corpus();
    const std::string out = dir() + "/corpus";
    const Result r = run("--device cpu -x 40 -b 4 -t 128 -s 0 -v 20 -m 4 -o " + out);
    CHECK_RUN(r, 0, "train data         built-in corpus, 30.9 M tokens; left",
              "validation data    built-in corpus, 1.1 M tokens; left", "step 0/40 | val loss 5.",
              format(" | floor %.4f\n", corpus.val_nats));
    const double val = number_after(r.out, "val loss ");
    CHECK(val > 2 && val < 4);
    CHECK(rows(out, "val").size() == 3);
    for (const char* kind : {"run", "val"})
        for (const double floor : values(out, kind, "floor_nats"))
            CHECK_NEAR(floor, corpus.val_nats, 1e-12);
}

// Training data alone has no validation data.
TEST(other_data_has_no_known_floor) {
    const std::string own = "--device cpu -e tiny -x 0 -b 1 -t 16 -s 0 -v 1 -m 1 ";
    const Result val_only = run(own + "-j " + text_file());
    CHECK_RUN(val_only, 0, "train data         built-in corpus, 30.9 M tokens",
              "validation data    text file, 100318 tokens");
    CHECK(!contains(val_only.out, "floor"));

    const Result train_only = run(own + "-i " + text_file());
    CHECK_RUN(train_only, 0,
              "train data         text file, 100318 tokens; left out: 13 at the end\nmemory  ");
    CHECK(!contains(train_only.out, "val loss"));
}

TEST_MAIN
