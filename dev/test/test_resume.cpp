// Tests checkpoints and resuming, through ./train_gpt2cu on the CPU. A run that stops anywhere and
// resumes must write what one that never stopped writes. Every later model, state and row of the
// log is the same byte for byte. dev/test_program has the GPUs.
#include <csignal>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "dev/test/processes.h"
#include "dev/test/small_model.h"
#include "run/checkpoint_files.h"

namespace {

// With one thread a run of such a small model takes a third of the time.
const bool kOneThread = !setenv("OMP_THREAD_LIMIT", "1", 1);

// -------------------------------------------------------------------------------------------------
// The model and its data

// The shards have 7, 4 and 11 windows of 16 tokens.
constexpr int kWindows = 22;
std::string write_shards(const std::string& name) {
    const std::string folder = dir() + "/" + name;
    std::filesystem::create_directory(folder);
    write_shard(folder + "/a.bin", make_tokens(7 * 16 + 1, 1));
    write_shard(folder + "/b.bin", make_tokens(4 * 16 + 15, 2));
    write_shard(folder + "/c.bin", make_tokens(11 * 16 + 3, 3));
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
        write_choices(path, {{0, 1, {7, 8, 9}, {{1, 2}, {3, 4, 5}, {6}}}});
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
// The rows that there must be, up to their steps. Without samples, sample_every is 0.
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
    const size_t at =
        std::mismatch(got.begin(), got.end(), want.begin(), want.end()).first - got.begin();
    test::report(__FILE__, __LINE__,
                 format("%s differs from byte %zu of %zu on", what.c_str(), at, want.size()));
}
// Checks the log, and every checkpoint of the straight run from a step on.
void check_same_run(const std::string& straight, const std::string& resumed, int from) {
    int compared = 0;
    for (int step = from; step <= newest_model(straight); step++)
        for (const std::string& name : {model_path("", step), state_path("", step)})
            if (exists(straight + name) && ++compared)
                check_same(resumed + name, read_file(resumed + name), read_file(straight + name));
    CHECK(compared >= 2);
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
// Going on

TEST(a_run_logs_each_step_and_saves_where_the_data_goes_on) {
    const std::string& out = straight_run();
    check_same("log", log_of(out, true), expected_log(kSteps, 3, 5, true));
    const std::string log = read_file(out + "/log.jsonl");
    CHECK(log.find("{\"kind\": \"run\", \"device\": \"CPU, ") == 0);
    CHECK(contains(
        log,
        format(
            ", \"precision\": \"fp32\", \"attention\": \"flash\", \"parameters\": %zu, \"B\": 2, "
            "\"T\": 16, \"tokens_per_step\": 64, \"steps\": 18, \"seed\": 5, \"gpus\": 1, "
            "\"context_parallel\": 1, \"settings\": \"--train-data ",
            kParameters)));
    CHECK(contains(log, "\\n--weight-decay 0.2\\n") && contains(log, "\\n--overfit off\\n"));
    // A state begins with what must be the same to go on, and with where the run is.
    std::string identity;
    for (const char* field :
         {"model: L=2 NH=2 C=32 V=257", "precision: fp32", "device: cpu", "B: 2", "T: 16",
          "tokens per step: 64", "seed: 5", "order of data: shuffled", "attention: flash",
          "matmuls: full precision", "data: "})
        identity += std::string("\nidentity ") + field;
    for (int step = 1; step <= kSteps; step++) {
        const std::string state = read_file(state_path(out, step));
        const std::string model = read_file(model_path(out, step));
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
    // Neither saving nor the number of threads changes anything. A run that saves only at the end
    // has the same end.
    const std::string quiet = dir() + "/quiet";
    CHECK_RUN(shell("unset OMP_THREAD_LIMIT; ./train_gpt2cu " + asking_options() + "-o " + quiet),
              0, "checkpoint");
    CHECK(kOneThread);
    CHECK((files_of(quiet) ==
           std::set<std::string>{"log.jsonl", "model_00000018.bin", "state_00000018.bin"}));
    check_same_run(out, quiet, kSteps);
}

// The log goes further than the checkpoint, and its last row is cut. There is a later state without
// a model.
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
// In the middle of the first epoch, at the last step before its end, inside a later one, at a step
// with a validation and a sample.
TEST(resumes_from_any_checkpoint) {
    for (const int step : {1, 5, 6, 15, 17})
        check_resumes(asking_options() + "-n 1 ", straight_run(), step);
}
// Rank 0 gets the other ranks' shares of the optimizer through the memory of its activations, and
// sends them back the same way. With one token a micro-batch that is smaller than a tensor's share,
// which then moves in pieces. Without clipping ranks that divide the optimizer have the bits of
// ranks that do not.
TEST(shares_larger_than_the_activations_move_in_pieces) {
    const std::string command = options(6) + "-v 0 -s 0 -b 1 -t 1 -d 8 --max-norm 0 ";
    for (const int ranks : {2, 4}) {
        std::istringstream total(run(command + format("--memory --gpus %d", ranks)).out);
        double per_token = NAN;
        for (std::string line; std::getline(total, line);) {
            if (contains(line, "activations per token")) {
                per_token = std::stod(line.substr(line.rfind(' ')));
            }
        }
        const size_t largest_share = kTensors[WTE].size / ranks * sizeof(float);
        CHECK(per_token < largest_share);

        const std::string whole = dir() + format("/whole_%d", ranks);
        const std::string divided = dir() + format("/divided_%d", ranks);
        const std::string several = command + format("-n 2 --gpus %d ", ranks);
        CHECK_RUN(run(several + "--zero 0 -o " + whole), 0, "step 6/6");
        CHECK_RUN(run(several + "--zero 1 -o " + divided), 0, "--zero 1", "--overlap 0",
                  "step 6/6");
        const auto check_same_files = [&](const std::string& out, int step) {
            for (const auto& path : {model_path, state_path}) {
                check_same(path(out, step), read_file(path(out, step)),
                           read_file(path(whole, step)));
            }
        };
        for (const int step : {2, 4, 6}) {
            check_same_files(divided, step);
        }

        const std::string resumed = dir() + format("/divided_again_%d", ranks);
        copy_checkpoint(whole, resumed, 2);
        CHECK_RUN(run(several + "--zero 1 -y -o " + resumed), 0, "resumed at step 2\n", "step 6/6");
        check_same_files(resumed, 4);
        check_same_files(resumed, 6);
    }
}

// The recipe may change on purpose. The run says so, and goes on with the new one.
TEST(resumes_with_another_recipe) {
    const std::string command = options(6) + "-v 0 -s 0 ";
    const std::string before = dir() + "/one_recipe";
    CHECK_RUN(run(command + "-o " + before), 0, "checkpoint");
    const struct {
        const char* option;
        const char* from;
        const char* to;
    } cases[] = {{"-x", "6", "9"},           {"-l", "0.003", "0.0030001"}, {"-u", "4", "5"},
                 {"-q", "0.1", "0.2"},       {"-k", "cosine", "linear"},   {"-c", "0.2", "0.3"},
                 {"--beta2", "0.95", "0.9"}, {"--max-norm", "1", "0.5"}};
    for (const auto& c : cases) {
        const std::string out = before + c.option;
        copy_checkpoint(before, out, 6);
        const std::string change = std::string(c.option) + " " + c.to + " ";
        const Result r = run(command + "-x 9 -y -o " + out + " " + change);
        CHECK_RUN(r, 0, "resumed at step 6\n", "step 9/9",
                  format("%s from %s to %s", c.option, c.from, c.to));
        CHECK(rows(out, "train").size() == 3);

        std::map<std::string, std::string> recipe = {
            {"-x", "9"}, {"-l", "3e-3"}, {"-u", "4"}, {"-q", "0.1"}, {"-k", "cosine"}};
        recipe[c.option] = c.to;
        std::vector<std::string> arguments;
        for (const auto& [option, value] : recipe) {
            arguments.push_back(option);
            arguments.push_back(value);
        }
        const Options o = options_of(arguments);
        const std::vector<double> rates = values(out, "train", "lr");
        for (size_t i = 0; i < rates.size(); i++) {
            CHECK_NEAR(rates[i], o.learning_rate(6 + static_cast<int>(i)), 1e-9);
        }
    }

    // Nothing has changed, and nothing is left to do.
    const std::string same = run(command + "-y -o " + before).out;
    for (const auto& c : cases) {
        CHECK(!contains(same, std::string(c.option) + " from "));
    }
    CHECK(contains(same, "nothing left to do") && !contains(same, " tok/s"));
}

// The pace is that of the steps behind the first two of a process, which make plans and
// connections. What is printed at the end follows from the rows of those steps, and a remaining
// time lies between what they took and what the whole took.
TEST(the_pace_counts_no_first_steps_also_after_a_resume) {
    const std::string out = dir() + "/pace";
    const auto check = [&](const std::string& more, int from, int to) {
        const double start = now();
        const Result r = run(options(to) + "-v 0 -s 0 -o " + out + more);
        const double elapsed = now() - start;
        CHECK_RUN(r, 0, format("step %d/%d |", to, to), "ETA 0:00\n");

        const std::vector<double> all = values(out, "train", "step_ms");
        CHECK(all.size() == size_t(to));
        double seconds = 0;
        int counted = 0;
        for (int step = std::min(from + 2, to - 1); step < to; step++) {
            seconds += all.at(step) / 1000;
            counted++;
        }
        const std::string last = r.out.substr(r.out.rfind(" steps in "));
        CHECK_NEAR(number_after(last.substr(0, last.find(" tok/s") + 1), " | "),
                   64 * counted / seconds, 0.51);
        CHECK(contains(r.out, format("\n%d steps in ", to - from)));
        CHECK(seconds < elapsed);
    };
    check("", 0, 1);
    check(" -y", 1, 2);
    check(" -y", 2, 4);
    check(" -y", 4, 9);
    check(" -y", 9, 40);

    // Nothing remains behind the last step of a run that takes a second or more.
    const Result longer = run(options(150) + "-v 0 -s 0 -d 1024");
    CHECK_RUN(longer, 0, "step 150/150 |");
    CHECK(longer.out.compare(longer.out.rfind("ETA "), 9, "ETA 0:00\n") == 0);

    // Of a run that is far from its end.
    const std::string far = dir() + "/far";
    const int steps = 10000000;
    CHECK_RUN(run(options(5) + "-v 0 -s 0 -o " + far), 0, "checkpoint");
    std::signal(SIGTERM, SIG_DFL);  // whoever started this test may ignore it
    const double start = now();
    const Result r = run_and_act(options(steps) + "-v 0 -s 0 -y -o " + far,
                                 format("step 20/%d", steps), "kill $pid");
    const double elapsed = now() - start;
    CHECK_RUN(r, 143, "interrupted at step ");
    const std::vector<double> all = values(far, "train", "step_ms");
    double seconds = 0;
    for (int step = 6; step <= 20; step++) {
        const size_t line = r.out.find(format("\nstep %d/%d |", step, steps));
        const size_t eta = r.out.find("ETA ", line) + 4;
        const std::string text = r.out.substr(eta, r.out.find('\n', eta) - eta);
        const double remaining = 60 * std::stod(text) + std::stod(text.substr(text.find(':') + 1));
        seconds = step <= 8 ? all.at(step - 1) / 1000 : seconds + all.at(step - 1) / 1000;
        const int counted = std::max(1, step - 7);
        CHECK(remaining + 1 >= (steps - step) * (seconds - 1e-5) / counted);
        CHECK(remaining <= (steps - step) * elapsed / counted);
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
        for (const double loss : values(out, "val", "loss_nats")) {
            all.push_back(loss);
        }
        CHECK(all.size() == 3);
        return all;
    };
    const std::vector<double> one = losses(1);
    for (const int ranks : {2, 4, 8}) {
        CHECK(losses(ranks) == one);
    }
}

// A batch takes as many windows as there are, and no more.
TEST(an_epoch_has_at_least_a_batch) {
    const std::string data = write_shard(dir() + "/two_windows.bin", make_tokens(2 * 16 + 1, 9));
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
        for (const std::string& row : rows(out, "sample")) {
            found.insert(row.substr(row.find("\"text\"")));
        }
        return found;
    };
    std::set<std::string> all = texts(1);
    CHECK(all.size() == 3);
    for (const std::string& text : texts(2147483647)) {
        all.insert(text);
    }
    CHECK(all.size() == 6);
}

// The data in order, one text, one batch again and again, and two ranks.
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

// The run is stopped with the next batch prepared. Either a signal lets it finish its step and
// save, or it is killed after rows that no checkpoint has.
TEST(resumes_after_a_signal) {
    // The signal comes twice, as from timeout(1), which signals its child and then its group.
    const char* twice = "kill -s %d $pid; kill -s CONT $pid; sleep 0.002; kill -s %d $pid";
    // enough that a signal comes before the end, however busy the machine is
    const int steps = 600;
    const std::string command = options(steps) + "-v 40 -s 50 -n 20 -o ";
    const std::string straight = dir() + "/long";
    CHECK_RUN(run(command + straight), 0, "checkpoint");
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGKILL}) {
        const std::string out = dir() + format("/signal_%d", signal);
        std::signal(signal, SIG_DFL);  // whoever started this test may ignore it
        // By then the checkpoint of step 20 is whole, because the one of step 40 waited for it.
        const Result r = run_and_act(command + out, format("step 43/%d |", steps),
                                     format(twice, signal, signal));
        CHECK_RUN(r, 128 + signal, signal == SIGKILL ? "step 43/" : "interrupted at step");
        const int step = newest_model(out);
        CHECK(signal == SIGKILL ? step >= 20 && step % 20 == 0 : step >= 43 && step < steps);
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
    for (const int s : {SIGINT, SIGHUP})
        signal(s, SIG_DFL);
}

// The log is elsewhere, and damaged in the middle. Two runs go on in the file that the link leads
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
    CHECK_RUN(run(command), 0, "resumed at step 9\n", log + ": dropped 2 rows that were not JSON");
    check_same_run(straight_run(), out, 10);
    for (int step = 6; step <= kSteps; step++)
        for (const auto& path : {model_path, state_path})
            std::filesystem::remove(path(out, step));
    const Result r = run(command);
    CHECK_RUN(r, 0, "resumed at step 5\n");
    CHECK(!contains(r.out, "JSON"));
    check_same_run(straight_run(), out, 6);
    CHECK(std::filesystem::is_symlink(log) && read_file(log) == read_file(elsewhere));
    CHECK(rows(out, "run").size() == 2);  // at steps 0 and 5: what followed step 9 is undone
}

// A run that was killed before its first checkpoint starts anew, with a new log.
TEST(nothing_to_resume_is_a_fresh_run) {
    const std::string out = dir() + "/fresh";
    std::filesystem::create_directory(out);
    write_file(out + "/log.jsonl",
               "{\"kind\": \"run\"}\n{\"kind\": \"val\", \"step\": 0}\n{\"kind\": \"tr");
    CHECK_RUN(run(asking_options() + "-n 1 -y 1 -o " + out), 0,
              "nothing to resume: starting at step 0\n");
    check_same_run(straight_run(), out, 1);
    CHECK(rows(out, "run").size() == 1);
    const std::set<std::string> files = files_of(out);
    const Result r = run(asking_options() + "-n 1 -y 1 -o " + out);
    CHECK_RUN(r, 0, "nothing left to do");
    CHECK(!contains(r.out, "\ncheckpoint ") && files_of(out) == files);  // nothing is written again
}

// A signal to one is one to all, and they end at one step.
TEST(ranks_end_together_after_a_signal) {
    const std::string out = dir() + "/together";
    const std::string command = options(9999) + "-v 0 -s 0 -b 1 --gpus 2 -o " + out;
    std::signal(SIGTERM, SIG_DFL);  // whoever started this test may ignore it
    CHECK_RUN(run_and_act(command, "step 7/", "kill $pid"), 143, "interrupted at step ");
    CHECK(newest_model(out) >= 7 && rows(out, "train").size() == size_t(newest_model(out)));
}

// -------------------------------------------------------------------------------------------------
// One directory, one run

TEST(a_second_run_in_a_directory_is_refused) {
    const std::string out = dir() + "/shared";
    const std::string command = options(kEndless) + "-v 0 -s 0 -n 1 -nk 2 -y 1 -o " + out;
    std::signal(SIGTERM, SIG_DFL);  // whoever started this test may ignore it
    const Result r = run_and_act(
        command, "step 7/", "./train_gpt2cu " + given_once(command) + "; echo code $?; kill $pid");
    CHECK_RUN(r, 143, "interrupted at step ",
              out + "/run.lock: another run is using this directory", "code 1\n");
    check_same("log", log_of(out, true), expected_log(newest_model(out), 0, 0));
}

// Each warning comes once, although there are three checkpoints.
TEST(what_is_removed_or_replaced_during_a_run_is_named) {
    const struct {
        const char* act;  // in the output directory, $out
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
        CHECK(count_of(r.out, " during the run; ") == int(c.named.size()));
        for (const std::string& named : c.named)
            CHECK(contains(r.out, out + named));
        CHECK(newest_model(out) == 60);
    }
}

// What a killed run leaves goes at the start: temporaries, and a state newer than every model. What
// another program or the user put there stays: an older state without its model is named, and a
// model without a state is kept.
TEST(what_killed_runs_left_goes_at_the_start) {
    const std::string out = dir() + "/left_over";
    for (const int step : {2, 3, 4})
        copy_checkpoint(straight_run(), out, step);
    std::set<std::string> left = {
        "notes.tmp.7",         "x_log.jsonl.tmp.7",      "state_7.bin",
        "model_00000001.bin2", "state_00000999.bin.bak", "xstate_00000999.bin",
        "model_00000001.bin",  "state_-0000001.bin",     "state_00000000.bin"};
    std::set<std::string> all = left;
    all.insert({"state_00000009.bin", "model_00000009.bin.tmp.7", "log.jsonl.tmp.7"});
    for (const std::string& name : all)
        write_file(out + "/" + name, "x");
    const Result r = run(options(4) + "-v 0 -s 0 -y 1 -nk 1 -o " + out);
    CHECK_RUN(r, 0, "nothing left to do", out + "/state_00000000.bin: has no model beside it");
    left.insert({"log.jsonl", "model_00000004.bin", "state_00000004.bin"});
    CHECK(files_of(out) == left);
}

// Two kills before the first checkpoint leave no model, wherever they came.
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

// A model without a state is the user's. -y refuses at the start where it would have to go over it
// or leave it aside, and whatever -y and -nk do, it stays.
TEST(a_model_without_a_state_is_never_lost) {
    const std::string out = dir() + "/states_removed";
    for (const int step : {2, 3, 4})
        copy_checkpoint(straight_run(), out, step);
    for (const int step : {2, 3, 4})
        std::filesystem::rename(state_path(out, step), state_path(out, step) + ".aside");
    const std::set<std::string> before = files_of(out);
    for (const std::string keep : {"", "-nk 1 "}) {
        CHECK_RUN(run(options() + keep + "-y 1 -o " + out), 1, model_path(out, 4),
                  model_path(out, 2), "with -e");
        CHECK(files_of(out) == before);
    }
    // The newest is ahead of a whole checkpoint.
    std::filesystem::rename(state_path(out, 3) + ".aside", state_path(out, 3));
    CHECK_RUN(run(options() + "-y 1 -o " + out), 1, model_path(out, 4) + ": ");
    // Behind it models without states are left.
    std::filesystem::rename(state_path(out, 4) + ".aside", state_path(out, 4));
    CHECK_RUN(run(options(6) + "-v 0 -s 0 -n 1 -nk 1 -y 1 -o " + out), 0, "resumed at step 4\n");
    CHECK(exists(model_path(out, 2)) && !exists(model_path(out, 4)) && exists(model_path(out, 6)));
    // One that appears during the run is not written over.
    const std::string mine = model_path(out, 8);
    const Result r =
        run_and_act(options(60) + "-v 0 -s 0 -n 8 -y 1 -o " + out, "step 7/", "echo mine >" + mine);
    CHECK_RUN(r, 1, mine + ": ");
    CHECK(read_file(mine) == "mine\n");
}

// Several states without a model are not what a kill leaves. Somebody has moved the models, and may
// bring them back.
TEST(states_whose_models_were_moved_stay) {
    const std::string out = dir() + "/models_moved";
    for (const int step : {2, 3, 4})
        copy_checkpoint(straight_run(), out, step);
    const std::set<std::string> before = files_of(out);
    for (const int step : {2, 3, 4})
        std::filesystem::rename(model_path(out, step), model_path(out, step) + ".aside");
    CHECK_RUN(run(options() + "-y 1 -o " + out), 1, out + ": has 3 states and no model");
    std::filesystem::rename(model_path(out, 2) + ".aside", model_path(out, 2));
    CHECK_RUN(run(options(2) + "-v 0 -s 0 -y 1 -o " + out), 0, "resumed at step 2\n",
              state_path(out, 4) + ": has no model");
    for (const int step : {3, 4})
        std::filesystem::rename(model_path(out, step) + ".aside", model_path(out, step));
    std::set<std::string> after = files_of(out);
    after.erase("log.jsonl");
    CHECK(after == before);
}

// A checkpoint that is whole counts, whatever becomes of older ones.
TEST(a_checkpoint_counts_although_an_older_one_cannot_be_removed) {
    const std::string out = dir() + "/unpruned";
    const Result r = run_and_act(options(kEndless) + "-v 0 -s 0 -n 3 -nk 1 -o " + out, "step 4/",
                                 "mkdir -p " + model_path(out, 1));
    CHECK_RUN(r, 1, model_path(out, 1) + ": ", "\ncheckpoint ");
    CHECK(!contains(r.out, "is not this run's"));
}

// It ends as after an error of the log: with one more try, which may succeed.
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
    const std::string changed = write_shards("changed");
    const std::string moved = write_shards("moved");
    std::string bytes = read_file(changed + "/b.bin");
    bytes[1024 + 60] ^= 1;
    write_file(changed + "/b.bin", bytes);
    const auto data = [](const std::string& folder) { return "-i '" + folder + "/*.bin'"; };
    for (const auto& [option, says] :
         {std::pair<std::string, const char*>{"-t 8",
                                              "T: the checkpoint has \"16\", this run has \"8\""},
          {"-b 1", "B: the checkpoint has \"2\", this run has \"1\""},
          {"-d 128", "tokens per step: the checkpoint has \"64\", this run has \"128\""},
          {"-e " + other_model,
           "model: the checkpoint has \"L=2 NH=2 C=32 V=257\", this run has \"L=2 NH=1 C=32 "
           "V=257\""},
          {"--attention naive", "attention: the checkpoint has \"flash\", this run has \"naive\""},
          {"--seed 6", "seed: the checkpoint has \"5\", this run has \"6\""},
          {"--no-shuffle",
           "order of data: the checkpoint has \"shuffled\", this run has \"as it is\""},
          {"-a 1", "order of data: the checkpoint has \"shuffled\", this run has \"one batch\""},
          {data(changed), "data: the checkpoint has "}})
        CHECK_RUN(run(options() + "-n 1 -y 1 -o " + out + " " + option), 1,
                  std::string(": checkpoint of another run: ") + says);
    // none of them did a step
    CHECK(newest_model(out) == 3);
    // the same data in another place
    CHECK_RUN(run(options(4) + data(moved) + " -v 0 -y 1 -o " + out), 0, "step 4/4");
}

// Of a checkpoint's two files the state knows its model.
TEST(refuses_damaged_checkpoints) {
    const std::string out = dir() + "/damaged";
    const std::string state_file = state_path(out, 4);
    const std::string file = model_path(out, 4);
    for (const int step : {2, 4})
        copy_checkpoint(straight_run(), out, step);
    const std::string command = options() + "-n 1 -y 1 -o " + out;
    const std::string state = read_file(state_file);
    const std::string model = read_file(file);
    const std::string differs = file + ": damaged parameters";
    // never over an earlier run
    CHECK_RUN(run(options() + "-o " + out), 1, out + ": has an earlier run");
    const auto flipped = [](std::string bytes, size_t at) {
        bytes[at] ^= 4;
        return bytes;
    };
    const struct {
        std::string state, model, message;
    } cases[] = {{state + "x", model, state_file + ": too long"},
                 {state, flipped(model, model.size() - 1), differs},
                 {state, read_file(model_path(out, 2)), differs},
                 {state, flipped(model, 4 * 3), "found fp32, L=2 NH=2 C=32 V=261"}};
    for (const auto& c : cases) {
        write_file(state_file, c.state);
        write_file(file, c.model);
        CHECK_RUN(run(command), 1, c.message);
    }
    const std::string alone = dir() + "/alone";
    const std::string generate = "2>/dev/null --device cpu --generate 3 -e ";
    copy_checkpoint(straight_run(), alone, 4);
    for (const auto& path : {model_path, state_path})
        std::filesystem::rename(path(alone, 4), path(alone, 5));
    CHECK_RUN(run(options() + "-y -o " + alone), 1,
              state_path(alone, 5) + ": the step in it: expected 5, found 4");
    std::filesystem::remove(state_path(alone, 5));
    // a model alone is one, too
    CHECK_RUN(run(options() + "-o " + alone), 1, alone + ": has an earlier run");
    write_file(state_file, state);
    write_file(file, model);
    for (const std::string& folder : {alone, out})
        CHECK(run(generate + folder).out == run(generate + file).out);
    std::filesystem::remove(file);  // as if the program died between the two files
    CHECK_RUN(run(command), 0, "resumed at step 2\n");
    check_same("state", read_file(state_path(out, kSteps)),
               read_file(state_path(straight_run(), kSteps)));
}

// -------------------------------------------------------------------------------------------------
// The files

TEST(which_checkpoints_are_written_and_kept) {
    for (const auto& [keep, written, kept] :
         {std::tuple<const char*, int, std::vector<int>>{"-x 0", 0, {}},
          {"-x 7 -n 3", 3, {3, 6, 7}},
          {"-x 8 -n 4 -nk 0", 2, {4, 8}},
          {"-x 11 -n 2 -nk 1 -nm 4", 6, {4, 8, 11}},
          {"-x 2 -n 5 -nk 4", 1, {2}}}) {
        const std::string out = dir() + "/kept" + keep;
        const Result r = run(options() + "-v 0 -s 0 " + keep + " -o '" + out + "'");
        CHECK(r.code == 0 && count_of(r.out, "\ncheckpoint ") == written);
        std::set<std::string> expected = {"log.jsonl"};
        for (const int step : kept)
            for (const auto& path : {model_path, state_path})
                expected.insert(path("", step).substr(1));
        if (files_of(out) != expected)
            test::report(__FILE__, __LINE__, format("%s: other files", keep));
    }
}

// The rate ruins the weights in the first step. The second step stops before its update.
TEST(a_loss_that_is_not_finite_names_the_last_good_checkpoint) {
    const std::string out = dir() + "/ruined";
    CHECK_RUN(run(options() + "-v 0 -s 0 -u 0 -l 1e30 -n 1 -o " + out), 1,
              "last good checkpoint: " + model_path(out, 1) + ";");
    CHECK((files_of(out) ==
           std::set<std::string>{"log.jsonl", "model_00000001.bin", "state_00000001.bin"}));
    // Decay at this rate passes the largest number in the second step.
    const std::string in_update = dir() + "/in_update";
    CHECK_RUN(run(options() + "-v 0 -s 0 -u 1 -k linear -l 1e20 -c 1e25 -n 1 -o " + in_update), 1,
              "no checkpoint is written");
    CHECK(newest_model(in_update) == -1);
}

// An error of the data ends the run with a checkpoint of the last whole step. There is a wrong
// token in the sixth of seven windows, or validation data is cut meanwhile. Two ranks stop
// together.
TEST(an_error_of_the_data_ends_with_a_checkpoint) {
    std::vector<int> tokens = make_tokens(7 * 16 + 1, 1);
    tokens[5 * 16 + 10] = 9999;
    const std::string bad = write_shard(dir() + "/bad.bin", tokens);
    const std::string val = write_shard(dir() + "/val.bin", tokens);
    const std::string common = options() + "-v 0 -s 0 --no-shuffle -b 1 -d ";
    const std::string cut = "truncate -s 1030 " + val;
    for (const auto& [more, steps] : {std::pair{"16 ", 5}, {"32 --gpus 2 ", 2}}) {
        const std::string out = dir() + format("/data_%d", steps);
        CHECK_RUN(run(common + more + "-i " + bad + " -o " + out), 1,
                  bad + ": token at offset 1204");
        CHECK(newest_model(out) == steps && rows(out, "train").size() == size_t(steps));
    }
    tokens[5 * 16 + 10] = 1;
    write_shard(val, tokens);
    const std::string out = dir() + "/cut_val";
    CHECK_RUN(
        run_and_act(options(60) + "-s 0 -v 5 -m -1 -j " + val + " -o " + out, "step 7/60 |", cut),
        1, val + ": truncated");
    CHECK(newest_model(out) == 10);
    CHECK_RUN(run(options(12) + "-s 0 -v 0 -m -1 -y -o " + out), 0, "resumed at step 10",
              "step 12/12");
}

// Whichever rank it is that cannot read its windows of the second step.
TEST(an_error_of_any_rank_ends_all) {
    for (const int rank : {0, 1, 2}) {
        std::vector<int> tokens = make_tokens(9 * 16 + 1, 1);
        tokens[(3 + rank) * 16 + 5] = 9999;
        const std::string data = write_shard(dir() + format("/bad_%d.bin", rank), tokens);
        const std::string out = dir() + format("/bad_for_%d", rank);
        const std::string command = options() + "-v 0 -s 0 --no-shuffle -b 1 -d 48 --gpus 3 ";
        CHECK_RUN(run(command + "-i " + data + " -o " + out), 1, data + ": token at offset");
        CHECK(newest_model(out) == 1 && rows(out, "train").size() == 1);
    }
}

// A checkpoint that cannot be written ends the run as soon as that is known, and not at the next
// checkpoint, which here would be the end. The directory is moved away, or files may not be as
// large as a model. The log is smaller.
TEST(a_checkpoint_that_fails_ends_the_run_soon) {
    const int at = 250;
    const int steps = 2 * at - 1;
    const std::string gone = dir() + "/gone";
    const std::string limited = dir() + "/limited";
    const std::string command = "--device cpu -e " + model_file(kEndOften) + " -i " + text_file() +
                                format(" -b 16 -t 24 -v 0 -s 0 -x %d -n %d -o ", steps, at);
    const Result moved = run_and_act(command + gone, format("step 10/%d |", steps),
                                     "mv " + gone + " " + gone + "_away");
    const int kib = static_cast<int>(kParameters * sizeof(float) / 1024) - 1;
    const Result too_large =
        shell(format("bash -c 'ulimit -f %d; exec ./train_gpt2cu ", kib) + command + limited + "'");

    for (const auto& [r, out] : {std::pair{moved, gone}, {too_large, limited}}) {
        CHECK_RUN(r, 1, "train_gpt2cu: " + out + "/", format("\nstep %d/%d |", at, steps));
        CHECK(contains(r.out, out + "/state_") || contains(r.out, out + "/model_"));
        CHECK(!contains(r.out, format("\nstep %d/%d |", steps, steps)));
    }
}

// As tee may at Ctrl-C. A run that nobody reads goes on, saves, and says so.
TEST(a_reader_that_ends_takes_no_run_along) {
    const std::string out = dir() + "/head";
    const std::string program = given_once(options(40) + "-v 0 -s 0 -o " + out);
    CHECK_RUN(shell("(./train_gpt2cu " + program + "; echo code $? >&2) | head -12"), 0, "code 1\n",
              "stdout: a line could not be written");
    CHECK(newest_model(out) == 40 && rows(out, "train").size() == 40);
}

// dev/test_recipe starts from models in fp32. The rate is too small to change a weight.
TEST(a_bf16_model_file_is_read) {
    const std::string path = dir() + "/half.bin";
    const std::string out = dir() + "/from_half";
    std::string half = model_header(5);
    std::string rounded = read_file(model_file(kEndOften));
    for (size_t at = 1024; at < rounded.size(); at += 4) {
        half += rounded.substr(at + 2, 2);  // bf16 is an fp32's upper half
        rounded[at] = rounded[at + 1] = 0;
    }
    write_file(path, half);
    CHECK_RUN(run(options(1) + "-v 0 -s 0 -u 0 -l 1e-30 -o " + out + " -e " + path), 0,
              "checkpoint");
    check_same("model", read_file(model_path(out, 1)), rounded);
}

// A model whose vocabulary has no end of a text trains, without samples.
TEST(a_model_that_cannot_write_trains) {
    const std::string path = dir() + "/no_end.bin";
    const std::string out = dir() + "/no_end";
    // 256 bytes and nothing else
    write_file(path, model_header(3, NH, 256) + bytes_of(make_weights(kEndOften)));
    const std::string data = write_shard(dir() + "/sevens.bin", std::vector<int>(100, 7));
    CHECK_RUN(
        run(options(2) + "-v 1 -s 1 -e " + path + " -i " + data + " -j " + data + " -o " + out), 0,
        "checkpoint");
    check_same("log", log_of(out, true), expected_log(2, 1, 0));
}

// No use of such a model succeeds. dev/test_recipe sees where each tensor lies.
TEST(a_model_with_a_nan_is_refused) {
    const std::string path = dir() + "/nan.bin";
    std::string bytes = read_file(model_file(kEndOften));
    const float nan = NAN;
    std::memcpy(&bytes[1024 + 4 * (offset_of(LNFW) - 1)], &nan, 4);
    write_file(path, bytes);
    const std::string evaluate = "--device cpu --eval-only -t 16 -j " + text_file();
    for (const std::string& use :
         {std::string("--device cpu --generate 1"), evaluate, options(1) + "-v 0 -s 0"})
        CHECK_RUN(run(use + " -e " + path), 1, path + ": not finite: fcprojb (");
}

TEST_MAIN
