// Tests checkpoints and resuming, through ./train_gpt2cu on the CPU. A run that stops anywhere and
// resumes must write what a run that never stopped writes: every later model, state and row of the
// log is the same, byte for byte. dev/test_program does the same on GPUs.
#include <csignal>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "dev/test/processes.h"
#include "dev/test/small_model.h"
#include "run/checkpoint_files.h"

namespace {

// -------------------------------------------------------------------------------------------------
// The model and its data

// In the three shards. Each also has the last window's last target, and up to 14 tokens after it
// that belong to no window.
constexpr int kWindows = 7 + 4 + 11;

std::string write_shards(const std::string& name) {
    const std::string folder = dir() + "/" + name;
    std::filesystem::create_directory(folder);
    write_shard(folder + "/a.bin", make_tokens(7 * T + 1, 1));
    write_shard(folder + "/b.bin", make_tokens(4 * T + 15, 2));
    write_shard(folder + "/c.bin", make_tokens(11 * T + 3, 3));
    return folder;
}

// A step takes 4 windows in 2 micro-batches, so an epoch ends inside a step. 18 steps go into the
// fourth epoch.
constexpr int kSteps = 18;
constexpr int kEndless = 1000000;  // steps, for a run that something else ends

std::string options(int steps = kSteps) {
    static const std::string shards = write_shards("shards");
    return "--device cpu -e " + model_file(kEndOften) + " -i '" + shards + "/*.bin' -j " + shards +
           "/c.bin " +
           format("-b 2 -t 16 -d 64 -x %d -v 3 -m 2 -s 5 -g 8 -u 4 -l 3e-3 -c 0.2 --seed 5 ",
                  steps);
}

// The same with a question for each validation.
std::string asking_options() {
    static const std::string path = dir() + "/question.bin";
    if (!exists(path))
        write_questions(path, {{0, 1, {7, 8, 9}, {{1, 2}, {3, 4, 5}, {6}}}});
    return options() + "--hellaswag " + path + " ";
}

// -------------------------------------------------------------------------------------------------
// What a run has written

std::set<std::string> files_of(const std::string& folder) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
        names.insert(entry.path().filename());
    names.erase("run.lock");
    return names;
}

// The files that a run leaves if it keeps the checkpoints of these steps alone.
std::set<std::string> files_with_checkpoints(const std::vector<int>& steps) {
    std::set<std::string> names = {"log.jsonl"};
    for (const int step : steps)
        for (const auto& path : {model_path, state_path})
            names.insert(path("", step).substr(1));
    return names;
}

// The rows of a log up to their times, or only up to their steps, without those of kind "run".
std::string log_of(const std::string& folder, bool only_steps = false) {
    std::string rows;
    std::istringstream log(read_file(folder + "/log.jsonl"));
    for (std::string line; std::getline(log, line);) {
        const size_t step = line.find(',', line.find("\"step\""));
        const size_t times = line.find(", \"step_ms\"");
        if (!contains(line, "{\"kind\": \"run\""))
            rows += line.substr(0, only_steps ? step : times) + "\n";
    }
    return rows;
}

// The rows that there must be, up to their steps. What is done every 0 steps is never done.
std::string expected_log(int steps, int val_every, int sample_every, bool question = false) {
    std::string rows;
    for (int step = 0; step <= steps; step++) {
        const auto row = [&](const char* kind, int every) {
            if (every && (step % every == 0 || step == steps))
                rows += format("{\"kind\": \"%s\", \"step\": %d\n", kind, step);
        };
        if (step > 0)
            row("train", 1);
        row("val", val_every);
        row("hellaswag", question ? val_every : 0);
        if (step > 0)
            row("sample", sample_every);
    }
    return rows;
}

// Checks that two files or texts are the same and not empty.
void check_same(const std::string& what, const std::string& got, const std::string& want) {
    if (!want.empty() && got == want)
        return;
    const auto differs = std::mismatch(got.begin(), got.end(), want.begin(), want.end()).first;
    test::report(__FILE__, __LINE__,
                 format("%s differs from byte %zd of %zu on", what.c_str(), differs - got.begin(),
                        want.size()));
}

// Checks that two runs have the same checkpoint.
void check_same_checkpoint(const std::string& straight, const std::string& resumed, int step) {
    for (const auto& path : {model_path, state_path})
        check_same(path(resumed, step), read_file(path(resumed, step)),
                   read_file(path(straight, step)));
}

// Checks the log, and every checkpoint of the straight run from a step on.
void check_same_run(const std::string& straight, const std::string& resumed, int from) {
    int compared = 0;
    for (int step = from; step <= newest_model(straight); step++)
        if (exists(model_path(straight, step))) {
            check_same_checkpoint(straight, resumed, step);
            compared++;
        }
    CHECK(compared > 0);
    check_same("log of " + resumed, log_of(resumed), log_of(straight));
}

void copy_checkpoint(const std::string& from, const std::string& to, int step) {
    std::filesystem::create_directory(to);
    for (const auto& path : {model_path, state_path})
        std::filesystem::copy_file(path(from, step), path(to, step));
}

// A run that never stops, with a checkpoint of each step.
const std::string& straight_run() {
    static const std::string out = dir() + "/straight";
    if (!exists(out))
        CHECK_RUN(run(asking_options() + "-n 1 -o " + out), 0,
                  format("step %d/%d", kSteps, kSteps));
    return out;
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Resuming

TEST(a_run_logs_each_step) {
    const std::string& out = straight_run();
    check_same("log", log_of(out, /*only_steps=*/true),
               expected_log(kSteps, /*val_every=*/3, /*sample_every=*/5, /*question=*/true));
    const std::string log = read_file(out + "/log.jsonl");
    CHECK(log.find("{\"kind\": \"run\", \"device\": \"CPU, ") == 0);
    CHECK(contains(
        log,
        format(
            ", \"precision\": \"fp32\", \"attention\": \"flash\", \"parameters\": %zu, \"B\": 2, "
            "\"T\": 16, \"tokens_per_step\": 64, \"steps\": 18, \"seed\": 5, \"gpus\": 1, "
            "\"context_parallel\": 1, \"settings\": \"--train-data ",
            kParameters)));
    CHECK(contains(log, "\\n--weight-decay 0.2\\n"));
    CHECK(contains(log, "\\n--overfit off\\n"));
}

// A state begins with what must be the same to resume, and with where the run is in its data.
TEST(a_state_says_where_the_data_continues) {
    std::string identity;
    for (const char* field :
         {"model: L=2 NH=2 C=32 V=257", "precision: fp32", "device: cpu", "B: 2", "T: 16",
          "tokens per step: 64", "seed: 5", "order of data: shuffled", "attention: flash",
          "matmuls: full precision", "data: "})
        identity += std::string("\nidentity ") + field;
    for (int step = 1; step <= kSteps; step++) {
        const std::string state = read_file(state_path(straight_run(), step));
        const std::string model = read_file(model_path(straight_run(), step));
        CHECK(state.find("gpt2 training state, version 2" + identity) == 0);

        const int windows = 4 * step;  // handed out
        const std::string counters =
            format("\nstep: %d\nmodel checksum: %zu\nepoch: %d\nwindow: %d\nbatches: %d\n", step,
                   size_t(checksum64(&model[1024], model.size() - 1024)), windows / kWindows,
                   windows % kWindows, 2 * step);
        CHECK(contains(state, counters));

        const size_t optimizer = 2 * kParameters * sizeof(float);
        CHECK(state.find("\n\n") + 2 + optimizer == state.size());
    }
}

// A run that saves only at the end has the same end.
TEST(saves_and_threads_change_nothing) {
    const std::string quiet = dir() + "/quiet";
    CHECK_RUN(shell("unset OMP_THREAD_LIMIT; ./train_gpt2cu " + asking_options() + "-o " + quiet),
              0, "checkpoint");
    CHECK(files_of(quiet) == files_with_checkpoints({kSteps}));
    check_same_run(straight_run(), quiet, kSteps);
}

// Resumes from the checkpoint of a step, in a copy of a run that was killed later: its log has rows
// of later steps and half a row at the end, and there is a later state without a model.
static void check_resumes(const std::string& command, const std::string& straight, int step) {
    const std::string out = straight + format("_from_%d", step);
    for (const int s : {step - 1, step})
        if (exists(state_path(straight, s)))
            copy_checkpoint(straight, out, s);
    write_file(state_path(out, step + 1), "of a run that was killed before it wrote the model");
    write_file(out + "/log.jsonl",
               read_file(straight + "/log.jsonl") + "{\"kind\": \"train\", \"step\": 1");
    CHECK_RUN(run(command + "-y 1 -o " + out), 0, format("resumed at step %d\n", step));
    check_same_run(straight, out, step + 1);
}

// From a step in the middle of the first epoch, the last one before its end, the one in which it
// ends, one with a validation and a sample, and the last but one.
TEST(resumes_from_any_checkpoint) {
    for (const int step : {1, 5, 6, 15, 17})
        check_resumes(asking_options() + "-n 1 ", straight_run(), step);
}

namespace {

// Bytes of activations for each token, as --memory says.
double activations_per_token(const std::string& options) {
    std::istringstream table(run(options + "--memory").out);
    double bytes = NAN;
    for (std::string line; std::getline(table, line);)
        if (contains(line, "activations per token"))
            bytes = std::stod(line.substr(line.rfind(' ')));
    return bytes;
}

}  // namespace

// Rank 0 gets the other ranks' shares of the optimizer through the memory of its activations, and
// sends them back the same way. If a micro-batch is a single token, that memory is smaller than a
// tensor's share, which then moves in pieces. Nothing is clipped, so ranks that divide the
// optimizer compute the same bits as ranks that do not.
TEST(shares_larger_than_the_activations_move_in_pieces) {
    for (const int ranks : {2, 4}) {
        const std::string command =
            options(6) + format("-v 0 -s 0 -b 1 -t 1 -d 8 --max-norm 0 --gpus %d ", ranks);
        const size_t largest_share = kTensors[WTE].size / ranks * sizeof(float);
        CHECK(activations_per_token(command) < largest_share);

        const std::string whole = dir() + format("/whole_%d", ranks);
        const std::string divided = dir() + format("/divided_%d", ranks);
        CHECK_RUN(run(command + "-n 2 --zero 0 -o " + whole), 0, "step 6/6");
        CHECK_RUN(run(command + "-n 2 --zero 1 -o " + divided), 0, "--zero 1", "--overlap 0",
                  "step 6/6");
        for (const int step : {2, 4, 6})
            check_same_checkpoint(whole, divided, step);

        const std::string resumed = dir() + format("/divided_again_%d", ranks);
        copy_checkpoint(whole, resumed, 2);
        CHECK_RUN(run(command + "-n 2 --zero 1 -y -o " + resumed), 0, "resumed at step 2\n",
                  "step 6/6");
        for (const int step : {4, 6})
            check_same_checkpoint(whole, resumed, step);
    }
}

namespace {

// A change of the recipe: an option, from one value to another.
struct Change {
    const char* option;
    const char* from;
    const char* to;
};
const Change kChanges[] = {{"-x", "6", "9"},           {"-l", "0.003", "0.0030001"},
                           {"-u", "4", "5"},           {"-q", "0.1", "0.2"},
                           {"-k", "cosine", "linear"}, {"-c", "0.2", "0.3"},
                           {"--beta2", "0.95", "0.9"}, {"--max-norm", "1", "0.5"}};

// Checks the learning rates of steps 7 to 9 of a run with this change.
void check_rates(const std::string& out, const Change& change) {
    std::map<std::string, std::string> recipe = {
        {"-x", "9"}, {"-l", "3e-3"}, {"-u", "4"}, {"-q", "0.1"}, {"-k", "cosine"}};
    recipe[change.option] = change.to;
    std::vector<std::string> arguments;
    for (const auto& [option, value] : recipe) {
        arguments.push_back(option);
        arguments.push_back(value);
    }
    const Options o = options_of(arguments);
    const std::vector<double> rates = values(out, "train", "lr");
    CHECK(rates.size() == 3);
    for (size_t i = 0; i < rates.size(); i++)
        CHECK_NEAR(rates[i], o.learning_rate(6 + static_cast<int>(i)), 1e-9);
}

}  // namespace

// The recipe may change on purpose. The run says so, and uses the new one from then on.
TEST(resumes_with_another_recipe) {
    const std::string command = options(6) + "-v 0 -s 0 ";
    const std::string before = dir() + "/one_recipe";
    CHECK_RUN(run(command + "-o " + before), 0, "checkpoint");
    for (const Change& change : kChanges) {
        const std::string out = before + change.option;
        copy_checkpoint(before, out, 6);
        CHECK_RUN(run(command + "-x 9 -y -o " + out + " " + change.option + " " + change.to), 0,
                  "resumed at step 6\n", "step 9/9",
                  format("%s from %s to %s", change.option, change.from, change.to));
        check_rates(out, change);
    }

    // nothing has changed, and nothing is left to do
    const std::string same = run(command + "-y -o " + before).out;
    for (const Change& change : kChanges)
        CHECK(!contains(same, std::string(change.option) + " from "));
    CHECK(contains(same, "nothing left to do"));
    CHECK(!contains(same, " tok/s"));
}

namespace {

// Trains steps from + 1 to `to` and checks the pace that is printed at the end. It is that of the
// steps after the first two of a process, which make plans and connections.
void check_pace(const std::string& out, int from, int to) {
    const double start = now();
    const Result r = run(options(to) + "-v 0 -s 0 -o " + out + (from > 0 ? " -y" : ""));
    const double elapsed = now() - start;
    CHECK_RUN(r, 0, format("step %d/%d |", to, to), "ETA 0:00\n",
              format("\n%d steps in ", to - from));

    const std::vector<double> step_ms = values(out, "train", "step_ms");
    CHECK(step_ms.size() == size_t(to));
    double seconds = 0;
    const int first = std::min(from + 3, to);  // the last step, if there is none after those two
    for (int step = first; step <= to; step++)
        seconds += step_ms.at(step - 1) / 1000;
    CHECK(seconds < elapsed);

    // "9 steps in 0:00 | loss 3.2 | 5000 tok/s", of which the last number is wanted
    const std::string last = r.out.substr(r.out.rfind(" steps in "));
    const double rate = number_after(last.substr(0, last.find(" tok/s")), " | ");
    CHECK_NEAR(rate, 64 * (to - first + 1) / seconds, 0.51);
}

// The seconds that remain according to the "ETA minutes:seconds" of this step's line.
double remaining_at(const std::string& printed, int step, int steps) {
    const size_t line = printed.find(format("\nstep %d/%d |", step, steps));
    const size_t begin = printed.find("ETA ", line) + 4;
    const std::string eta = printed.substr(begin, printed.find('\n', begin) - begin);
    return 60 * std::stod(eta) + std::stod(eta.substr(eta.find(':') + 1));
}

}  // namespace

TEST(the_pace_counts_no_first_steps_also_after_a_resume) {
    const std::string out = dir() + "/pace";
    check_pace(out, 0, 1);
    check_pace(out, 1, 2);
    check_pace(out, 2, 4);
    check_pace(out, 4, 9);
    check_pace(out, 9, 40);
}

TEST(nothing_remains_after_the_last_step_of_a_longer_run) {
    const Result r = run(options(150) + "-v 0 -s 0 -d 1024");
    CHECK_RUN(r, 0, "step 150/150 |");
    CHECK(r.out.compare(r.out.rfind("ETA "), 9, "ETA 0:00\n") == 0);
}

// The remaining time that a step prints follows from the steps so far, without the first two of the
// process. Their pace lies between the steps' times in the log and the time of the whole program.
// The run resumes at step 5 and is far from its end.
TEST(the_remaining_time_follows_from_the_pace) {
    const std::string out = dir() + "/far";
    const int steps = 10000000;
    CHECK_RUN(run(options(5) + "-v 0 -s 0 -o " + out), 0, "checkpoint");
    stop_ignoring_signals();
    const double start = now();
    const Result r = run_and_act(options(steps) + "-v 0 -s 0 -y -o " + out,
                                 format("step 20/%d", steps), "kill $pid");
    const double elapsed = now() - start;
    CHECK_RUN(r, 128 + SIGTERM, "interrupted at step ");

    const std::vector<double> step_ms = values(out, "train", "step_ms");
    for (int step = 6; step <= 20; step++) {
        // steps 6 and 7 have nothing but themselves to go by
        const int first = std::min(step, 8);
        const int counted = step - first + 1;
        double seconds = 0;
        for (int s = first; s <= step; s++)
            seconds += step_ms.at(s - 1) / 1000;

        const double rounding = 1e-5;
        const double least = (steps - step) * (seconds - rounding) / counted;
        const double most = (steps - step) * elapsed / counted;
        const double remaining = remaining_at(r.out, step, steps);  // in whole seconds
        CHECK(remaining + 1 >= least);
        CHECK(remaining <= most);
    }
}

// The first step's loss and the validation's are those of one rank to the last bit, however many
// ranks there are.
TEST(the_first_losses_do_not_depend_on_the_number_of_ranks) {
    const auto losses = [](int ranks) {
        const std::string out = dir() + format("/first_%d", ranks);
        const std::string several = ranks > 1 ? format("--gpus %d ", ranks) : "";
        CHECK_RUN(
            run(options(1) + "-v 1 -m -1 -s 0 -b 1 -d 128 -l 1e-30 -o " + out + " " + several), 0,
            "step 1/1");
        std::vector<double> all = values(out, "train", "loss_nats");
        for (const double loss : values(out, "val", "loss_nats"))
            all.push_back(loss);
        CHECK(all.size() == 3);
        return all;
    };
    const std::vector<double> one = losses(1);
    for (const int ranks : {2, 4, 8})
        CHECK(losses(ranks) == one);
}

// A batch may be all windows that there are. A larger one is refused.
TEST(an_epoch_has_at_least_a_batch) {
    const std::string data = write_shard(dir() + "/two_windows.bin", make_tokens(2 * T + 1, 9));
    const std::string command = options(3) + "-v 0 -s 0 -i " + data + " ";
    CHECK_RUN(run(command + "-b 2 -d 32"), 0, "step 3/3");
    CHECK_RUN(run(command + "-b 3 -d 48"), 1, data, "smaller -b");
}

// Each sample of a run has random numbers of its own, which its seed and the step choose. The rate
// is too small to change a weight.
TEST(samples_of_a_run_differ) {
    const auto texts = [](int seed) {
        const std::string out = dir() + format("/samples_%d", seed);
        CHECK_RUN(run(options(3) + format("-v 0 -s 1 -g 60 -u 0 -l 1e-30 --seed %d -e ", seed) +
                      model_file(kNoEnd) + " -o " + out),
                  0, "sample");
        std::set<std::string> found;
        for (const std::string& row : rows(out, "sample"))
            found.insert(row.substr(row.find("\"text\"")));
        return found;
    };
    std::set<std::string> all = texts(1);
    CHECK(all.size() == 3);
    for (const std::string& text : texts(2147483647))
        all.insert(text);
    CHECK(all.size() == 6);
}

// The data in order, one text, one batch again and again, another attention, and several ranks.
TEST(resumes_with_other_data_and_ranks) {
    int run_number = 0;
    for (const std::string& other : {std::string("--no-shuffle"), "-i " + text_file(),
                                     std::string("-a 1"), std::string("--attention naive"),
                                     std::string("-b 1 --gpus 4 --context-parallel 2 --zero 1"),
                                     std::string("-b 1 --gpus 2 --zero 0")}) {
        const std::string straight = dir() + format("/other_%d", run_number++);
        const std::string command = options() + other + " -n 7 ";
        CHECK_RUN(run(command + "-o " + straight), 0, "checkpoint");
        check_resumes(command, straight, 7);
    }
}

// A signal lets the run finish its step and save. By then the batch of the next step, which is not
// taken, has been read. The signal comes twice, as from timeout(1), which signals its child and
// then its group. SIGKILL comes after rows that no checkpoint has.
TEST(resumes_after_a_signal) {
    const char* twice = "kill -s %d $pid; kill -s CONT $pid; sleep 0.002; kill -s %d $pid";
    // so many that the signal comes before the end, however busy the machine is
    const int steps = 600;
    const std::string command = options(steps) + "-v 40 -s 50 -n 20 -o ";
    const std::string straight = dir() + "/long";
    CHECK_RUN(run(command + straight), 0, "checkpoint");
    stop_ignoring_signals();
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGKILL}) {
        const std::string out = dir() + format("/signal_%d", signal);
        // By then the checkpoint of step 20 is whole, because the one of step 40 waited for it.
        const Result r = run_and_act(command + out, format("step 43/%d |", steps),
                                     format(twice, signal, signal));
        CHECK_RUN(r, 128 + signal, signal == SIGKILL ? "step 43/" : "interrupted at step");
        const int step = newest_model(out);
        if (signal == SIGKILL)
            CHECK(step >= 20 && step % 20 == 0);
        else
            CHECK(step >= 43 && step < steps);

        std::ofstream(out + "/log.jsonl", std::ios::app) << "{\"kind\": \"train\", \"st";
        CHECK_RUN(run(command + out + " -y 1"), 0, format("resumed at step %d\n", step));
        check_same_run(straight, out, step + 1);
    }
}

// As under nohup, or behind the & of a script.
TEST(signals_that_were_ignored_stay_so) {
    for (const int s : {SIGINT, SIGHUP})
        signal(s, SIG_IGN);
    CHECK_RUN(
        run_and_act(options(60) + "-v 0 -s 0", "step 5/60 |", "kill -s INT $pid; kill -s HUP $pid"),
        0, "step 60/60");
    stop_ignoring_signals();
}

// The log is elsewhere, and damaged in the middle. Two runs continue the file that the link leads
// to.
TEST(resumes_a_log_that_is_a_link_and_damaged) {
    const std::string out = dir() + "/linked";
    const std::string log = out + "/log.jsonl";
    const std::string elsewhere = dir() + "/elsewhere.jsonl";
    for (const int step : {5, 9})
        copy_checkpoint(straight_run(), out, step);
    std::filesystem::create_symlink(elsewhere, log);
    std::string text = read_file(straight_run() + "/log.jsonl");
    const std::string damage = std::string("{\"kind\": \"tr\n\0\0\n", 16);
    text.insert(text.find("{\"kind\": \"train\", \"step\": 3,"), damage);
    write_file(elsewhere, text);

    const std::string command = asking_options() + "-n 1 -y 1 -o " + out;
    CHECK_RUN(run(command), 0, "resumed at step 9\n", log + ": dropped ", "2 rows");
    check_same_run(straight_run(), out, 10);

    for (int step = 6; step <= kSteps; step++)
        for (const auto& path : {model_path, state_path})
            std::filesystem::remove(path(out, step));
    const Result r = run(command);
    CHECK_RUN(r, 0, "resumed at step 5\n");
    CHECK(!contains(r.out, "JSON"));
    check_same_run(straight_run(), out, 6);
    CHECK(std::filesystem::is_symlink(log));
    CHECK(read_file(log) == read_file(elsewhere));
    CHECK(rows(out, "run").size() == 2);  // at steps 0 and 5: what followed step 9 is undone
}

// A run that was killed before its first checkpoint starts again, with a new log.
TEST(nothing_to_resume_is_a_fresh_run) {
    const std::string out = dir() + "/fresh";
    std::filesystem::create_directory(out);
    write_file(out + "/log.jsonl",
               "{\"kind\": \"run\"}\n{\"kind\": \"val\", \"step\": 0}\n{\"kind\": \"tr");
    CHECK_RUN(run(asking_options() + "-n 1 -y 1 -o " + out), 0,
              "nothing to resume: starting at step 0\n");
    check_same_run(straight_run(), out, 1);
    CHECK(rows(out, "run").size() == 1);
}

TEST(a_run_that_has_ended_writes_nothing_again) {
    const std::string out = dir() + "/ended";
    copy_checkpoint(straight_run(), out, kSteps);
    write_file(out + "/log.jsonl", read_file(straight_run() + "/log.jsonl"));
    const Result r = run(asking_options() + "-n 1 -y 1 -o " + out);
    CHECK_RUN(r, 0, "nothing left to do");
    CHECK(!contains(r.out, "\ncheckpoint "));
    CHECK(files_of(out) == files_with_checkpoints({kSteps}));
}

// A signal ends all ranks at the same step, although each looks for it at a moment of its own.
TEST(ranks_end_together_after_a_signal) {
    const std::string out = dir() + "/together";
    const std::string command = options(9999) + "-v 0 -s 0 -b 1 --gpus 2 -o " + out;
    stop_ignoring_signals();
    CHECK_RUN(run_and_act(command, "step 7/", "kill $pid"), 143, "interrupted at step ");
    CHECK(newest_model(out) >= 7);
    CHECK(rows(out, "train").size() == size_t(newest_model(out)));
}

// -------------------------------------------------------------------------------------------------
// One directory, one run

TEST(a_second_run_in_a_directory_is_refused) {
    const std::string out = dir() + "/shared";
    const std::string command = options(kEndless) + "-v 0 -s 0 -n 1 -nk 2 -y 1 -o " + out;
    stop_ignoring_signals();
    const Result r = run_and_act(
        command, "step 7/", "./train_gpt2cu " + given_once(command) + "; echo code $?; kill $pid");
    CHECK_RUN(r, 143, "interrupted at step ", out + "/run.lock: another run", "code 1\n");
    check_same("log", log_of(out, /*only_steps=*/true),
               expected_log(newest_model(out), /*val_every=*/0, /*sample_every=*/0));
}

// Each warning comes once, although there are three checkpoints.
TEST(what_is_removed_or_replaced_during_a_run_is_named) {
    const struct {
        const char* act;  // on the output directory, $out
        std::vector<std::string> named;
    } cases[] = {
        {"rm $out/run.lock", {"/run.lock: was removed"}},
        {"rm $out/log.jsonl", {"/log.jsonl: was removed"}},
        {"cp $out/log.jsonl $out/x; mv $out/x $out/log.jsonl", {"/log.jsonl: was replaced"}},
        {"mv $out $out.old; mkdir $out",
         {": was replaced", "/run.lock: was removed", "/log.jsonl: was removed"}},
        {"ln -s $PWD $out/link; cp $out/log.jsonl $out/copy; touch $out/run.lock", {}},
    };
    int n = 0;
    for (const auto& c : cases) {
        const std::string out = dir() + format("/replaced_%d", n++);
        const Result r = run_and_act(options(60) + "-v 0 -s 0 -n 20 -o " + out, "step 7/60 |",
                                     "out=" + out + "; " + c.act);
        CHECK_RUN(r, 0, "step 60/60");
        CHECK(count_of(r.out, " during the run") == int(c.named.size()));
        for (const std::string& named : c.named)
            CHECK(contains(r.out, out + named));
        CHECK(newest_model(out) == 60);
    }
}

// What a killed run leaves is removed at the start: temporaries, and a state newer than every
// model. What another program or the user put there stays: an older state without its model is
// named, and a model without a state is kept.
TEST(what_killed_runs_left_is_removed_at_the_start) {
    const std::string out = dir() + "/left_over";
    for (const int step : {2, 3, 4})
        copy_checkpoint(straight_run(), out, step);
    std::set<std::string> kept = {
        "notes.tmp.7",         "x_log.jsonl.tmp.7",      "state_7.bin",
        "model_00000001.bin2", "state_00000999.bin.bak", "xstate_00000999.bin",
        "model_00000001.bin",  "state_-0000001.bin",     "state_00000000.bin"};
    std::set<std::string> all = kept;
    all.insert({"state_00000009.bin", "model_00000009.bin.tmp.7", "log.jsonl.tmp.7"});
    for (const std::string& name : all)
        write_file(out + "/" + name, "x");

    const Result r = run(options(4) + "-v 0 -s 0 -y 1 -nk 1 -o " + out);
    CHECK_RUN(
        r, 0, "nothing left to do",
        out + "/state_00000000.bin: the model that belongs to this training state is missing");
    kept.insert({"log.jsonl", "model_00000004.bin", "state_00000004.bin"});
    CHECK(files_of(out) == kept);
}

// Two kills before the first checkpoint leave no model, at whatever moment they come.
TEST(resumes_after_kills_before_the_first_checkpoint) {
    const std::string out = dir() + "/no_model";
    std::filesystem::create_directory(out);
    for (const char* name :
         {"state_00000001.bin", "model_00000001.bin.tmp.7", "state_00000002.bin.tmp.8"})
        write_file(out + "/" + name, "x");
    write_file(out + "/log.jsonl", "{\"kind\": \"run\"}\n{\"kind\": \"train\", \"step\": 1}\n");
    CHECK_RUN(run(asking_options() + "-n 1 -y 1 -o " + out), 0, "nothing to resume");
    CHECK(files_of(out) == files_of(straight_run()));
    check_same_run(straight_run(), out, 1);
}

namespace {

// A folder with the checkpoints of steps 2 to 4.
std::string with_three_checkpoints(const std::string& name) {
    const std::string out = dir() + "/" + name;
    for (const int step : {2, 3, 4})
        copy_checkpoint(straight_run(), out, step);
    return out;
}

void move_aside(const std::string& path) {
    std::filesystem::rename(path, path + ".aside");
}
void bring_back(const std::string& path) {
    std::filesystem::rename(path + ".aside", path);
}

}  // namespace

// A model without a state is the user's. If the newest model is one, -y refuses at the start,
// whatever -nk is: a run from an earlier step would write over it or pass it by.
TEST(models_without_states_are_not_resumed) {
    const std::string out = with_three_checkpoints("states_moved");
    for (const int step : {2, 3, 4})
        move_aside(state_path(out, step));
    const std::set<std::string> before = files_of(out);
    for (const std::string keep : {"", "-nk 1 "}) {
        CHECK_RUN(run(options() + keep + "-y 1 -o " + out), 1, model_path(out, 4),
                  model_path(out, 2), "with -e");
        CHECK(files_of(out) == before);
    }

    // the newest is ahead of a whole checkpoint
    bring_back(state_path(out, 3));
    CHECK_RUN(run(options() + "-y 1 -o " + out), 1, model_path(out, 4) + ": ");
}

TEST(older_models_without_states_are_kept) {
    const std::string out = with_three_checkpoints("older_states_moved");
    for (const int step : {2, 3})
        move_aside(state_path(out, step));
    CHECK_RUN(run(options(6) + "-v 0 -s 0 -n 1 -nk 1 -y 1 -o " + out), 0, "resumed at step 4\n");
    CHECK(exists(model_path(out, 2)));
    CHECK(exists(model_path(out, 3)));
    CHECK(!exists(model_path(out, 4)));
    CHECK(exists(model_path(out, 6)));
}

TEST(a_model_that_appears_during_a_run_is_not_written_over) {
    const std::string out = dir() + "/model_appears";
    const std::string mine = model_path(out, 8);
    const Result r =
        run_and_act(options(60) + "-v 0 -s 0 -n 8 -o " + out, "step 7/", "echo mine >" + mine);
    CHECK_RUN(r, 1, mine + ": ");
    CHECK(read_file(mine) == "mine\n");
}

// Several states without a model are not what a kill leaves. Somebody has moved the models, and may
// bring them back.
TEST(states_whose_models_were_moved_stay) {
    const std::string out = with_three_checkpoints("models_moved");
    const std::set<std::string> before = files_of(out);
    for (const int step : {2, 3, 4})
        move_aside(model_path(out, step));
    CHECK_RUN(run(options() + "-y 1 -o " + out), 1, out + ": has 3 training states but no model");

    bring_back(model_path(out, 2));
    CHECK_RUN(run(options(2) + "-v 0 -s 0 -y 1 -o " + out), 0, "resumed at step 2\n",
              state_path(out, 4) + ": the model that belongs to this training state is missing");
    for (const int step : {3, 4})
        bring_back(model_path(out, step));
    std::set<std::string> after = files_of(out);
    after.erase("log.jsonl");
    CHECK(after == before);
}

// A checkpoint that is whole counts, even if the older ones cannot be removed after it: here the
// list of them fails, because a directory has the name of a model.
TEST(a_checkpoint_counts_although_an_older_one_cannot_be_removed) {
    const std::string out = dir() + "/unpruned";
    const Result r = run_and_act(options(kEndless) + "-v 0 -s 0 -n 3 -nk 1 -o " + out, "step 4/",
                                 "mkdir -p " + model_path(out, 1));
    CHECK_RUN(r, 1, model_path(out, 1) + ": ", "\ncheckpoint ");
    CHECK(!contains(r.out, "this run has not written it"));
}

// The run ends as after an error of the log: with one more try, which may succeed.
TEST(a_checkpoint_that_cannot_be_written_ends_with_one_more_try) {
    const std::string out = dir() + "/one_fails";
    const std::string blocked = state_path(out, 7);
    const Result r =
        run_and_act(options(kEndless) + "-v 0 -s 0 -n 7 -o " + out, "step 3/", "mkdir " + blocked);
    CHECK_RUN(r, 1, blocked + ": ", "\ncheckpoint ");
    std::filesystem::remove(blocked);
    const int saved = newest_model(out);
    CHECK(saved > 7);
    CHECK(rows(out, "train").size() == size_t(saved));
}

// -------------------------------------------------------------------------------------------------
// What is refused. dev/test_data has all differences and damages that a state or a model shows by
// itself.

// Other settings are refused by name, with the checkpoint's value and the run's.
TEST(refuses_other_settings_by_name) {
    const std::string out = dir() + "/refuse";
    const std::string other_model = dir() + "/other.bin";
    copy_checkpoint(straight_run(), out, 3);
    write_file(other_model, model_header(3, 1) + bytes_of(make_weights(kEndOften)));
    const struct {
        std::string option;
        std::string field;
        std::string has;
        std::string given;
    } cases[] = {{"-t 8", "T", "16", "8"},
                 {"-b 1", "B", "2", "1"},
                 {"-d 128", "tokens per step", "64", "128"},
                 {"-e " + other_model, "model", "L=2 NH=2 C=32 V=257", "L=2 NH=1 C=32 V=257"},
                 {"--attention naive", "attention", "flash", "naive"},
                 {"--seed 6", "seed", "5", "6"},
                 {"--no-shuffle", "order of data", "shuffled", "as it is"},
                 {"-a 1", "order of data", "shuffled", "one batch"}};
    for (const auto& c : cases)
        CHECK_RUN(run(options() + "-n 1 -y 1 -o " + out + " " + c.option), 1,
                  format(": %s is \"%s\" in the checkpoint, but \"%s\" in this run",
                         c.field.c_str(), c.has.c_str(), c.given.c_str()));
    CHECK(newest_model(out) == 3);  // none of them did a step
}

TEST(refuses_other_data_but_not_another_place) {
    const std::string out = dir() + "/other_data";
    copy_checkpoint(straight_run(), out, 3);
    const auto resume_with = [&](const std::string& folder) {
        return run(options(4) + "-i '" + folder + "/*.bin' -v 0 -y 1 -o " + out);
    };
    const std::string changed = write_shards("changed");
    std::string bytes = read_file(changed + "/b.bin");
    bytes[1024 + 60] ^= 1;
    write_file(changed + "/b.bin", bytes);
    CHECK_RUN(resume_with(changed), 1, ": data is \"", "\" in the checkpoint, but \"");
    CHECK(newest_model(out) == 3);
    CHECK_RUN(resume_with(write_shards("moved")), 0, "step 4/4");
}

TEST(a_new_run_refuses_an_earlier_one) {
    const std::string out = dir() + "/earlier";
    copy_checkpoint(straight_run(), out, 4);
    CHECK_RUN(run(options() + "-o " + out), 1, out + ": already contains a run");
    std::filesystem::remove(state_path(out, 4));  // a model alone is one, too
    CHECK_RUN(run(options() + "-o " + out), 1, out + ": already contains a run");
}

// A state has a checksum of its model. The older checkpoint is whole, but nobody may resume from it
// unnoticed.
TEST(refuses_damaged_checkpoints) {
    const std::string out = dir() + "/damaged";
    const std::string state_file = state_path(out, 4);
    const std::string model_file = model_path(out, 4);
    for (const int step : {2, 4})
        copy_checkpoint(straight_run(), out, step);
    const std::string state = read_file(state_file);
    const std::string model = read_file(model_file);
    const std::string other_model = read_file(model_path(straight_run(), 2));
    const auto flipped = [&](size_t at) {
        std::string bytes = model;
        bytes[at] ^= 4;
        return bytes;
    };
    const size_t vocabulary_at = 12;  // the fourth int32 of the header
    const struct {
        std::string state;
        std::string model;
        std::string message;
    } cases[] = {{state + "x", model, state_file + ": too long"},
                 {state, flipped(model.size() - 1), model_file + ": damaged"},
                 {state, other_model, model_file + ": damaged"},
                 {state, flipped(vocabulary_at), "L=2 NH=2 C=32 V=261"}};
    for (const auto& c : cases) {
        write_file(state_file, c.state);
        write_file(model_file, c.model);
        CHECK_RUN(run(options() + "-n 1 -y 1 -o " + out), 1, c.message);
    }
}

TEST(refuses_a_checkpoint_under_another_step) {
    const std::string out = dir() + "/renamed";
    copy_checkpoint(straight_run(), out, 4);
    for (const auto& path : {model_path, state_path})
        std::filesystem::rename(path(out, 4), path(out, 5));
    CHECK_RUN(run(options() + "-y -o " + out), 1, state_path(out, 5) + ": ", "expected 5, found 4");
}

// The model of a directory is the newest, with a state or without.
TEST(a_directory_stands_for_its_newest_model) {
    const std::string generate = "2>/dev/null --device cpu --generate 3 -e ";
    const std::string out = dir() + "/generates";
    for (const int step : {2, 4})
        copy_checkpoint(straight_run(), out, step);
    const std::string text = run(generate + model_path(straight_run(), 4)).out;
    CHECK(run(generate + out).out == text);
    std::filesystem::remove(state_path(out, 4));
    CHECK(run(generate + out).out == text);
}

// As if the program died between the two files.
TEST(resumes_from_the_checkpoint_before_a_state_without_a_model) {
    const std::string out = dir() + "/between";
    for (const int step : {2, 4})
        copy_checkpoint(straight_run(), out, step);
    std::filesystem::remove(model_path(out, 4));
    CHECK_RUN(run(asking_options() + "-n 1 -y 1 -o " + out), 0, "resumed at step 2\n");
    check_same_checkpoint(straight_run(), out, kSteps);
}

// -------------------------------------------------------------------------------------------------
// The files

TEST(which_checkpoints_are_written_and_kept) {
    const struct {
        const char* options;
        int written;
        std::vector<int> kept;
    } cases[] = {{"-x 0", 0, {}},
                 {"-x 7 -n 3", 3, {3, 6, 7}},
                 {"-x 8 -n 4 -nk 0", 2, {4, 8}},
                 {"-x 11 -n 2 -nk 1 -nm 4", 6, {4, 8, 11}},
                 {"-x 2 -n 5 -nk 4", 1, {2}}};
    for (const auto& c : cases) {
        const std::string out = dir() + "/kept" + c.options;
        const Result r = run(options() + "-v 0 -s 0 " + c.options + " -o '" + out + "'");
        CHECK_RUN(r, 0);
        CHECK(count_of(r.out, "\ncheckpoint ") == c.written);
        if (files_of(out) != files_with_checkpoints(c.kept))
            test::report(__FILE__, __LINE__, format("%s: other files", c.options));
    }
}

// The rate ruins the weights in the first step. The second step stops before its update.
TEST(a_loss_that_is_not_finite_names_the_last_good_checkpoint) {
    const std::string out = dir() + "/ruined";
    CHECK_RUN(run(options() + "-v 0 -s 0 -u 0 -l 1e30 -n 1 -o " + out), 1,
              "last good checkpoint: " + model_path(out, 1) + ";");
    CHECK(files_of(out) == files_with_checkpoints({1}));
}

// Decay at this rate passes the largest number in the first step, whose checkpoint is due.
TEST(weights_that_are_not_finite_are_not_saved) {
    const std::string out = dir() + "/in_update";
    CHECK_RUN(run(options() + "-v 0 -s 0 -u 1 -k linear -l 1e20 -c 1e25 -n 1 -o " + out), 1,
              "no checkpoint is written");
    CHECK(newest_model(out) == -1);
}

// An error of the data ends the run with a checkpoint of the last whole step. Here the sixth of
// seven windows has a wrong token. Two ranks stop together.
TEST(an_error_of_the_data_ends_with_a_checkpoint) {
    std::vector<int> tokens = make_tokens(7 * T + 1, 1);
    tokens[5 * T + 10] = 9999;
    const std::string bad = write_shard(dir() + "/bad.bin", tokens);
    const struct {
        const char* options;
        int steps;
    } cases[] = {{"-d 16 ", 5}, {"-d 32 --gpus 2 ", 2}};
    for (const auto& c : cases) {
        const std::string out = dir() + format("/data_%d", c.steps);
        CHECK_RUN(run(options() + "-v 0 -s 0 --no-shuffle -b 1 " + c.options + "-i " + bad +
                      " -o " + out),
                  1, bad + ": token at offset 1204");
        CHECK(newest_model(out) == c.steps);
        CHECK(rows(out, "train").size() == size_t(c.steps));
    }
}

TEST(validation_data_that_is_cut_ends_with_a_checkpoint) {
    const std::string val = write_shard(dir() + "/val.bin", make_tokens(7 * T + 1, 1));
    const std::string out = dir() + "/cut_val";
    const std::string validate = "-s 0 -v 5 -m -1 -j " + val + " -o " + out;
    CHECK_RUN(run_and_act(options(60) + validate, "step 7/60 |", "truncate -s 1030 " + val), 1,
              val + ": truncated");
    CHECK(newest_model(out) == 10);
    CHECK_RUN(run(options(12) + "-s 0 -v 0 -m -1 -y -o " + out), 0, "resumed at step 10",
              "step 12/12");
}

// One rank cannot read its windows in the second step or in the first validation, whichever rank it
// is.
TEST(an_error_of_any_rank_ends_all) {
    int number = 0;
    for (const char* reads : {"-v 0 --no-shuffle -i ", "-v 3 -m -1 -j "})
        for (const int rank : {0, 1, 2}) {
            std::vector<int> tokens = make_tokens(9 * T + 1, 1);
            tokens[(3 + rank) * T + 5] = 9999;
            const std::string data = write_shard(dir() + format("/bad_%d.bin", number), tokens);
            const std::string out = dir() + format("/bad_run_%d", number);
            number++;
            CHECK_RUN(run(options() + "-s 0 -b 1 -d 48 --gpus 3 " + reads + data + " -o " + out), 1,
                      data + ": token at offset");
            CHECK(newest_model(out) == 1);
            CHECK(rows(out, "train").size() == 1);
        }
}

namespace {

// A run that cannot write its checkpoint in the middle ends as soon as that is known, and not at
// the next checkpoint, which is the last step's.
constexpr int kMiddle = 250;
constexpr int kLast = 2 * kMiddle - 1;

std::string options_with_a_checkpoint_in_the_middle() {
    return "--device cpu -e " + model_file(kEndOften) + " -i " + text_file() +
           format(" -b 16 -t 24 -v 0 -s 0 -x %d -n %d -o ", kLast, kMiddle);
}
void check_ends_soon(const Result& r, const std::string& out) {
    CHECK_RUN(r, 1, "train_gpt2cu: " + out + "/", format("\nstep %d/%d |", kMiddle, kLast));
    CHECK(contains(r.out, out + "/state_") || contains(r.out, out + "/model_"));
    CHECK(!contains(r.out, format("\nstep %d/%d |", kLast, kLast)));
}

}  // namespace

TEST(a_directory_that_is_moved_away_ends_the_run_soon) {
    const std::string out = dir() + "/gone";
    check_ends_soon(run_and_act(options_with_a_checkpoint_in_the_middle() + out,
                                format("step 10/%d |", kLast), "mv " + out + " " + out + "_away"),
                    out);
}

// Files may not be as large as a model. The log is smaller.
TEST(a_limit_of_files_ends_the_run_soon) {
    const std::string out = dir() + "/limited";
    const int kib = static_cast<int>(kParameters * sizeof(float) / 1024) - 1;
    check_ends_soon(shell(format("bash -c 'ulimit -f %d; exec ./train_gpt2cu ", kib) +
                          options_with_a_checkpoint_in_the_middle() + out + "'"),
                    out);
}

// A reader such as tee may end at Ctrl-C. The run continues, saves, and says so.
TEST(a_reader_that_ends_does_not_end_the_run) {
    const std::string out = dir() + "/head";
    const std::string program = given_once(options(40) + "-v 0 -s 0 -o " + out);
    CHECK_RUN(shell("(./train_gpt2cu " + program + "; echo code $? >&2) | head -12"), 0, "code 1\n",
              "train_gpt2cu: stdout: ");
    CHECK(newest_model(out) == 40);
    CHECK(rows(out, "train").size() == 40);
}

// dev/test_recipe starts from models in fp32. Here the rate is too small to change a weight.
TEST(a_bf16_model_file_is_read) {
    const std::string path = dir() + "/half.bin";
    const std::string out = dir() + "/from_half";
    std::string half = model_header(5);
    std::string rounded = read_file(model_file(kEndOften));
    for (size_t at = 1024; at < rounded.size(); at += 4) {
        half += rounded.substr(at + 2, 2);  // bf16 is an fp32's upper half
        rounded[at] = 0;
        rounded[at + 1] = 0;
    }
    write_file(path, half);
    CHECK_RUN(run(options(1) + "-v 0 -s 0 -u 0 -l 1e-30 -o " + out + " -e " + path), 0,
              "checkpoint");
    check_same("model", read_file(model_path(out, 1)), rounded);
}

// A model whose vocabulary lacks the end of a text trains, without samples.
TEST(a_model_that_cannot_write_trains) {
    const std::string path = dir() + "/no_end.bin";
    const std::string out = dir() + "/no_end";
    // 256 bytes and nothing else
    write_file(path, model_header(3, NH, 256) + bytes_of(make_weights(kEndOften)));
    const std::string data = write_shard(dir() + "/sevens.bin", std::vector<int>(100, 7));
    CHECK_RUN(
        run(options(2) + "-v 1 -s 1 -e " + path + " -i " + data + " -j " + data + " -o " + out), 0,
        "checkpoint");
    check_same("log", log_of(out, /*only_steps=*/true),
               expected_log(/*steps=*/2, /*val_every=*/1, /*sample_every=*/0));
}

// No use of such a model succeeds. dev/test_recipe tests where each tensor is.
TEST(a_model_with_a_nan_is_refused) {
    const std::string path = dir() + "/nan.bin";
    std::string bytes = read_file(model_file(kEndOften));
    const float nan = NAN;
    std::memcpy(&bytes[1024 + 4 * (offset_of(LNFW) - 1)], &nan, 4);
    write_file(path, bytes);
    const std::string evaluate = "--device cpu --eval-only -t 16 -j " + text_file();
    for (const std::string& use :
         {std::string("--device cpu --generate 1"), evaluate, options(1) + "-v 0 -s 0"})
        CHECK_RUN(run(use + " -e " + path), 1, path + ": fcprojb: ", " not finite");
}

int main(int argc, char** argv) {
    setenv("OMP_THREAD_LIMIT", "1", 1);  // with one thread so small a model is three times as fast
    return test::main(argc, argv);
}
