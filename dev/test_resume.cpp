// Tests checkpoints and resuming, through ./train_gpt2cu on the CPU. A run that stops anywhere and resumes must write
// what one that never stopped writes. Every later model, state and row of the log is the same byte for byte.
// dev/test_program has the GPUs.
#include <algorithm>
#include <cstring>
#include <set>

#include "dev/small_model.h"
#include "run/checkpoint.h"
#include "run/choices.h"

namespace {

// With one thread, and no second start to choose how threads wait, a run of such a small model takes a third of the
// time.
const bool kOneThread = !setenv("OMP_THREAD_LIMIT", "1", 1) && !setenv("OMP_WAIT_POLICY", "passive", 1);

// ---------------------------------------------------------------------------------------------------------------------
// The model and its data

template <class Value>
Value value_at(const std::string& bytes, size_t offset) {
    Value value{};
    if (offset + sizeof value <= bytes.size()) std::memcpy(&value, bytes.data() + offset, sizeof value);
    return value;
}
std::string small_model() {
    return model_file(kEndOften);
}
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
const std::string& shards() {
    static const std::string folder = write_shards("shards");
    return folder;
}

// A step takes 4 windows in 2 micro-batches, so an epoch ends inside a step. 18 steps go into the fourth epoch.
constexpr int kSteps = 18;
std::string options(int steps = kSteps) {
    return "--device cpu -e " + small_model() + " -i '" + shards() + "/*.bin' -j " + shards() + "/c.bin " +
           format("-b 2 -t 16 -d 64 -x %d -v 3 -m 2 -s 5 -g 8 -u 4 -l 3e-3 -c 0.2 --seed 5 ", steps);
}
// A question for each validation.
std::string with_question() {
    static const std::string path = dir() + "/question.bin";
    if (!exists(path)) write_choices(path, {{0, 1, {7, 8, 9}, {{1, 2}, {3, 4, 5}, {6}}}});
    return "--hellaswag " + path + " ";
}

// ---------------------------------------------------------------------------------------------------------------------
// What a run has written

std::set<std::string> files_of(const std::string& folder) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
    return names;
}
// The log's rows without times, and without those of kind "run".
std::vector<std::string> untimed_rows(const std::string& folder) {
    std::vector<std::string> rows;
    std::istringstream log(read_file(folder + "/log.jsonl"));
    for (std::string line; std::getline(log, line);)
        if (!contains(line, "{\"kind\": \"run\"")) rows.push_back(line.substr(0, line.find(", \"step_ms\"")));
    return rows;
}
// The kind and the step of each row that there must be. Without samples, sample_every is 0.
std::vector<std::string> expected_rows(int steps, int val_every, int sample_every, bool question) {
    std::vector<std::string> rows;
    for (int step = 0; step <= steps; step++) {
        const auto due = [&](int every) { return step % every == 0 || step == steps; };
        if (step > 0) rows.push_back(format("{\"kind\": \"train\", \"step\": %d,", step));
        if (due(val_every)) rows.push_back(format("{\"kind\": \"val\", \"step\": %d,", step));
        if (question && due(val_every)) rows.push_back(format("{\"kind\": \"hellaswag\", \"step\": %d,", step));
        if (step > 0 && sample_every && due(sample_every))
            rows.push_back(format("{\"kind\": \"sample\", \"step\": %d,", step));
    }
    return rows;
}
void check_rows(const std::string& folder, const std::vector<std::string>& expected) {
    const std::vector<std::string> rows = untimed_rows(folder);
    for (size_t i = 0; i < std::max(rows.size(), expected.size()); i++) {
        const std::string got = i < rows.size() ? rows[i] : "nothing",
                          want = i < expected.size() ? expected[i] : "nothing";
        if (got.compare(0, want.size(), want))
            return test::report(__FILE__, __LINE__,
                                format("%s/log.jsonl, row %zu of %zu (expected %zu): expected %s, found %s",
                                       folder.c_str(), i, rows.size(), expected.size(), want.c_str(), got.c_str()));
    }
}
// Checks that two files are the same and not empty.
void check_same(const std::string& a, const std::string& b) {
    const std::string x = read_file(a), y = read_file(b);
    if (!x.empty() && x == y) return;
    const size_t at = std::mismatch(x.begin(), x.end(), y.begin(), y.end()).first - x.begin();
    test::report(__FILE__, __LINE__, format("%s and %s differ from byte %zu on", a.c_str(), b.c_str(), at));
}
void check_same_run(const std::string& straight, const std::string& resumed, int from, int to) {
    CHECK(from <= to);
    for (int step = from; step <= to; step++) {
        check_same(model_path(straight, step), model_path(resumed, step));
        check_same(state_path(straight, step), state_path(resumed, step));
    }
    const std::vector<std::string> rows = untimed_rows(straight);
    CHECK(rows.size() > static_cast<size_t>(to));
    check_rows(resumed, rows);
}
void copy_checkpoint(const std::string& from, const std::string& to, int step) {
    std::filesystem::create_directory(to);
    for (const auto& path : {model_path, state_path}) std::filesystem::copy_file(path(from, step), path(to, step));
}

// A run that never stops, with a checkpoint of each step.
const std::string& straight_run() {
    static const std::string out = dir() + "/straight";
    if (!exists(out))
        CHECK_RUN(run(options() + with_question() + "-n 1 -o " + out), 0, format("step %d/%d", kSteps, kSteps));
    return out;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Going on

TEST(a_run_logs_each_step_and_saves_where_the_data_goes_on) {
    const std::string& out = straight_run();
    check_rows(out, expected_rows(kSteps, 3, 5, true));
    const std::string log = read_file(out + "/log.jsonl");
    CHECK(log.find("{\"kind\": \"run\", \"device\": \"CPU, ") == 0);
    CHECK(contains(log, format(", \"precision\": \"fp32\", \"attention\": \"flash\", \"parameters\": %zu, \"B\": 2, "
                               "\"T\": 16, \"tokens_per_step\": 64, \"steps\": 18, \"seed\": 5, \"gpus\": 1, "
                               "\"context_parallel\": 1, \"floor_nats\": null}\n",
                               kParameters)));
    for (int step = 1; step <= kSteps; step++) {
        const std::string state = read_file(state_path(out, step)), model = read_file(model_path(out, step));
        const size_t at = 16 + value_at<uint32_t>(state, 12) + 8;  // after the table and its checksum
        const int windows = 4 * step;                              // handed out
        const std::string counters = bytes_of(
            std::vector<uint64_t>{uint64_t(step), checksum64(&model[1024], model.size() - 1024),
                                  uint64_t(windows / kWindows), uint64_t(windows % kWindows), uint64_t(2 * step)});
        CHECK(state.compare(at, counters.size(), counters) == 0);
        CHECK(state.size() == at + counters.size() + 2 * kParameters * sizeof(float));
        CHECK(model.size() == 1024 + kParameters * sizeof(float));
    }
    // Neither saving nor the number of threads changes anything. A run that saves only at the end has the same end.
    const std::string quiet = dir() + "/quiet";
    CHECK_RUN(shell("unset OMP_THREAD_LIMIT; ./train_gpt2cu " + options() + with_question() + "-o " + quiet), 0,
              "checkpoint");
    CHECK(kOneThread);
    CHECK((files_of(quiet) == std::set<std::string>{"log.jsonl", "model_00000018.bin", "state_00000018.bin"}));
    check_same_run(out, quiet, kSteps, kSteps);
}

// Resumes from any checkpoint: in the middle of the first epoch, at the last step before its end, inside a later one,
// at a step with a validation and a sample. The log goes further than the checkpoint, and its last row is cut. There is
// a later model without a state.
TEST(resumes_from_any_checkpoint) {
    const std::string& straight = straight_run();
    for (const int step : {1, 5, 6, 15, 17}) {
        const std::string out = dir() + format("/from_%d", step);
        if (step > 1) copy_checkpoint(straight, out, step - 1);
        copy_checkpoint(straight, out, step);
        write_file(model_path(out, step + 1), "cut off");
        write_file(out + "/log.jsonl", read_file(straight + "/log.jsonl") + "{\"kind\": \"train\", \"step\": 1");
        CHECK_RUN(run(options() + with_question() + "-n 1 -y 1 -o " + out), 0, format("resumed at step %d\n", step));
        check_same_run(straight, out, step + 1, kSteps);
    }
}

// The data in order, one text, one batch again and again, and two ranks.
TEST(resumes_with_other_data_and_ranks) {
    const struct {
        const char* name;
        std::string options;
    } cases[] = {{"in_order", "--no-shuffle"},
                 {"text", "-i " + text_file()},
                 {"one_batch", "-a 1"},
                 {"ranks", "-b 1 --gpus 4 --context-parallel 2 --zero 1"},
                 {"naive", "--attention naive"}};
    for (const auto& c : cases) {
        const std::string straight = dir() + "/" + c.name, out = straight + "_resumed";
        const std::string command = options() + c.options + " -n 7 -o ";
        CHECK_RUN(run(command + straight), 0, "checkpoint");
        copy_checkpoint(straight, out, 7);
        write_file(out + "/log.jsonl", read_file(straight + "/log.jsonl"));
        CHECK_RUN(run(command + out + " -y 1"), 0, "resumed at step 7\n");
        check_same_run(straight, out, 14, 14);
        check_same_run(straight, out, kSteps, kSteps);
    }
}

// The run is stopped with the next batch prepared. Either a signal lets it finish its step and save, or it is killed
// after rows that no checkpoint has.
TEST(resumes_after_a_signal) {
    // The signal comes twice, as from timeout(1), which signals its child and then its group.
    const char* twice = "kill -s %d $pid; kill -s CONT $pid; sleep 0.002; kill -s %d $pid";
    const int steps = 150;
    const std::string command = options(steps) + "-v 40 -s 50 -n 20 -o ", straight = dir() + "/long";
    CHECK_RUN(run(command + straight), 0, "checkpoint");
    check_rows(straight, expected_rows(steps, 40, 50, false));
    for (const int signal : {SIGINT, SIGTERM, SIGKILL}) {
        const std::string out = dir() + format("/signal_%d", signal);
        const Result r = run_and_act(command + out, format("step 33/%d |", steps), format(twice, signal, signal));
        CHECK_RUN(r, 128 + signal, signal == SIGKILL ? "step 33/" : "interrupted at step");
        const int step = newest_checkpoint(out);
        if (signal == SIGKILL ? step % 20 : step < 33 || step >= steps)
            test::report(__FILE__, __LINE__, format("signal %d: a checkpoint of step %d", signal, step));
        std::ofstream(out + "/log.jsonl", std::ios::app) << "{\"kind\": \"train\", \"st";
        CHECK_RUN(run(command + out + " -y 1"), 0, format("resumed at step %d\n", step));
        for (int s = (step / 20 + 1) * 20; s < steps; s += 20) check_same(state_path(straight, s), state_path(out, s));
        check_same_run(straight, out, steps, steps);
    }
}

// A run that was killed before its first checkpoint starts anew, with a new log.
TEST(nothing_to_resume_is_a_fresh_run) {
    const std::string out = dir() + "/fresh";
    std::filesystem::create_directory(out);
    write_file(out + "/log.jsonl",
               "{\"kind\": \"run\", \"device\": \"x\"}\n{\"kind\": \"val\", \"step\": 0, \"loss_nats\": 1}\n"
               "{\"kind\": \"train\", \"step\": 1, \"loss_nats\": 1}\n{\"kind\": \"tr");
    CHECK_RUN(run(options() + with_question() + "-n 1 -y 1 -o " + out), 0, "nothing to resume: starting at step 0\n");
    check_same_run(straight_run(), out, 1, kSteps);
    const std::string log = read_file(out + "/log.jsonl");
    CHECK(log.find("\"run\"") == log.rfind("\"run\""));
}

TEST(a_finished_run_is_left_alone) {
    const std::string out = dir() + "/left";
    copy_checkpoint(straight_run(), out, kSteps);
    const std::string state = read_file(state_path(out, kSteps));
    const Result r = run(options() + "-y 1 -o " + out);
    CHECK_RUN(r, 0, "nothing left to do");
    CHECK(!contains(r.out, "\ncheckpoint "));  // nothing is written again
    CHECK(read_file(state_path(out, kSteps)) == state && files_of(out).size() == 3);
}

// ---------------------------------------------------------------------------------------------------------------------
// What is refused

// Other settings are refused by name, with the checkpoint's value and the run's.
TEST(refuses_other_settings_by_name) {
    const std::string out = dir() + "/refuse", other_model = dir() + "/other.bin";
    copy_checkpoint(straight_run(), out, 3);
    const std::string before = read_file(state_path(out, 3));
    write_file(other_model, model_header(3, 1) + bytes_of(make_weights(kEndOften)));
    const std::string changed = write_shards("changed"), renamed = write_shards("renamed"), more = write_shards("more");
    std::string bytes = read_file(changed + "/b.bin");
    bytes[1024 + 60] ^= 1;
    write_file(changed + "/b.bin", bytes);
    std::filesystem::rename(renamed + "/a.bin", renamed + "/z.bin");
    std::filesystem::copy_file(more + "/a.bin", more + "/d.bin");
    const auto data = [](const std::string& folder) { return "-i '" + folder + "/*.bin'"; };
    const struct {
        std::string option, message;
    } cases[] = {
        {"-t 8", "T: the checkpoint has \"16\", this run has \"8\""},
        {"-b 1", "B: the checkpoint has \"2\", this run has \"1\""},
        {"-d 128", "tokens per step: the checkpoint has \"64\", this run has \"128\""},
        {"-e " + other_model,
         "model: the checkpoint has \"L=2 NH=2 C=32 V=257\", this run has \"L=2 NH=1 C=32 V=257\""},
        {"--attention naive", "attention: the checkpoint has \"flash\", this run has \"naive\""},
        {"--seed 6", "seed: the checkpoint has \"5\", this run has \"6\""},
        {"--no-shuffle", "order of data: the checkpoint has \"shuffled\", this run has \"as it is\""},
        {"-a 1", "order of data: the checkpoint has \"shuffled\", this run has \"one batch\""},
        {data(changed), "data: the checkpoint has \""},
        {data(renamed), "data: the checkpoint has \""},  // the shards in another order
        {data(more), "data: the checkpoint has \""},
    };
    for (const auto& c : cases) {
        const Result r = run(options() + "-n 1 -y 1 -o " + out + " " + c.option);
        CHECK_RUN(r, 1, ": checkpoint of another run: " + c.message);
    }
    CHECK(read_file(state_path(out, 3)) == before && newest_checkpoint(out) == 3);  // none of them did a step
    std::filesystem::rename(shards(), shards() + "_moved");                         // the same data in another place
    CHECK_RUN(
        run(options(4) + "-y 1 -o " + out + " " + data(shards() + "_moved") + " -v 0 -j " + shards() + "_moved/c.bin"),
        0, "step 4/4");
    std::filesystem::rename(shards() + "_moved", shards());
}

// A machine without a GPU cannot have these differences, so the state file is changed, field by field.
TEST(refuses_another_identity_field_by_field) {
    const std::string out = dir() + "/fields";
    copy_checkpoint(straight_run(), out, 3);
    const std::string path = state_path(out, 3), good = read_file(path);
    CHECK(good.compare(0, 8, "gpt2stat") == 0 && value_at<uint32_t>(good, 8) == 1);
    const uint32_t table_bytes = value_at<uint32_t>(good, 12), fields = value_at<uint32_t>(good, 16);
    size_t at = 20;
    const auto text = [&] {
        const uint32_t length = value_at<uint32_t>(good, at);
        at += 4 + length;
        return good.substr(at - length, length);
    };
    std::string all;
    for (uint32_t i = 0; i < fields; i++) {
        const std::string name = text(), stored = text();
        all += name + ": " + stored + "\n";
        std::string bytes = good, other = stored;
        bytes[at - 1] = other.back() = 'x';  // its last character
        const uint64_t checksum = checksum64(bytes.data(), 16 + table_bytes);
        std::memcpy(&bytes[16 + table_bytes], &checksum, sizeof checksum);
        write_file(path, bytes);
        CHECK_RUN(run(options() + "-y 1 -o " + out), 1,
                  path + ": checkpoint of another run: " + name + ": the checkpoint has \"" + other +
                      "\", this run has \"" + stored + "\"");
    }
    const std::string expected =
        "model: L=2 NH=2 C=32 V=257\nprecision: fp32\ndevice: cpu\nB: 2\nT: 16\ntokens per step: 64\nseed: 5\n"
        "order of data: shuffled\nattention: flash\nmatmuls: full precision\ndata: ";
    CHECK(all.find(expected) == 0 && all.find('\n', expected.size()) == all.size() - 1);  // and no more
}

TEST(refuses_damaged_checkpoints) {
    const std::string out = dir() + "/damaged";
    copy_checkpoint(straight_run(), out, 2);
    copy_checkpoint(straight_run(), out, 4);
    const std::string command = options() + "-n 1 -y 1 -o " + out, state = read_file(state_path(out, 4)),
                      model = read_file(model_path(out, 4));
    CHECK_RUN(run(options() + "-o " + out), 1, "has a checkpoint of step 4: add -y 1");  // never over an earlier run
    const auto flipped = [](std::string bytes, size_t at) {
        bytes[at] ^= 4;
        return bytes;
    };
    const size_t counters = 16 + value_at<uint32_t>(state, 12) + 8;
    const struct {
        std::string state, model, message;
    } cases[] = {
        {state.substr(0, state.size() / 2), model, state_path(out, 4) + ": truncated"},
        {state + "x", model, state_path(out, 4) + ": too long"},
        {flipped(state, 30), model, state_path(out, 4) + ": damaged table"},
        {flipped(state, counters + 17), model, "damaged section \"counters\""},
        {flipped(state, state.size() - 1), model, "damaged section \"optimizer\""},
        {state, flipped(model, 1024), model_path(out, 4) + ": damaged: its parameters have checksum"},
        {state, flipped(model, model.size() - 1), model_path(out, 4) + ": damaged: its parameters have checksum"},
        {state, model.substr(0, model.size() - 4), model_path(out, 4) + ": truncated"},
        {state, flipped(model, 4 * 3), model_path(out, 4) + ": a fp32 model with L=2 NH=2 C=32 V=261"},
        {state, "", model_path(out, 4) + ": truncated"},
        {state, read_file(model_path(out, 2)), model_path(out, 4) + ": damaged: its parameters have checksum"},
    };
    for (const auto& c : cases) {
        write_file(state_path(out, 4), c.state);
        write_file(model_path(out, 4), c.model);
        CHECK_RUN(run(command), 1, c.message);
    }
    std::filesystem::remove(model_path(out, 4));
    CHECK_RUN(run(command), 1, model_path(out, 4) + ": cannot open");
    std::filesystem::remove(state_path(out, 4));  // as if the program died between the two files
    write_file(model_path(out, 4), model);
    CHECK_RUN(run(command), 0, "resumed at step 2\n");
    check_same(state_path(straight_run(), kSteps), state_path(out, kSteps));
}

// ---------------------------------------------------------------------------------------------------------------------
// The files

TEST(which_checkpoints_are_written_and_kept) {
    const struct {
        const char* options;
        int written;
        std::vector<int> kept;
    } cases[] = {{"-x 0", 0, {}},
                 {"-x 7", 1, {7}},
                 {"-x 7 -n 3", 3, {3, 6, 7}},
                 {"-x 8 -n 4 -nk 0", 2, {4, 8}},
                 {"-x 9 -n 2 -nk 2", 5, {8, 9}},
                 {"-x 8 -n 2 -nk 3", 4, {4, 6, 8}},
                 {"-x 3 -n 1 -nk 1", 3, {3}},
                 {"-x 2 -n 5 -nk 4", 1, {2}}};
    for (const auto& c : cases) {
        const std::string out = dir() + "/kept";
        std::filesystem::remove_all(out);
        const Result r = run(options() + "-v 0 -s 0 " + c.options + " -o " + out);
        int written = 0;
        for (size_t at = 0; (at = r.out.find("\ncheckpoint ", at)) != std::string::npos; at++) written++;
        CHECK(r.code == 0 && written == c.written);
        std::set<std::string> expected = {"log.jsonl"};
        for (const int step : c.kept)
            for (const auto& path : {model_path, state_path}) expected.insert(path(out, step).substr(out.size() + 1));
        if (files_of(out) != expected) test::report(__FILE__, __LINE__, format("%s: other files", c.options));
    }
}

// The rate ruins the weights in the first step. The second step stops before its update.
TEST(a_loss_that_is_not_finite_names_the_last_good_checkpoint) {
    const std::string out = dir() + "/ruined";
    CHECK_RUN(run(options() + "-v 0 -s 0 -u 0 -l 1e30 -n 1 -o " + out), 1,
              "last good checkpoint: " + state_path(out, 1) + ";");
    CHECK((files_of(out) == std::set<std::string>{"log.jsonl", "model_00000001.bin", "state_00000001.bin"}));
}

// A disk that is full in the middle of a checkpoint leaves no file in part. The model is written first, so without a
// state the step does not count. A limit on file size stands in for the disk, in blocks of 512 bytes.
TEST(a_full_disk_leaves_whole_files) {
    const struct {
        int blocks;
        const char* message;
        std::set<std::string> left;
    } cases[] = {{100, "model_00000002.bin: cannot write", {"log.jsonl"}},
                 {400, "state_00000002.bin: cannot write", {"log.jsonl", "model_00000002.bin"}}};
    for (const auto& c : cases) {
        const std::string out = dir() + format("/full_%d", c.blocks);
        CHECK_RUN(shell(format("ulimit -f %d; trap '' XFSZ; ./train_gpt2cu ", c.blocks) + options() +
                        "-v 0 -s 0 -n 2 -o " + out),
                  1, c.message);
        CHECK(files_of(out) == c.left && newest_checkpoint(out) == -1);
        check_rows(out, {"{\"kind\": \"train\", \"step\": 1,", "{\"kind\": \"train\", \"step\": 2,"});
        CHECK(read_file(out + "/log.jsonl").back() == '\n');
    }
}

// What is read is what is written, header and tensors, in both types of file. The rate is too small to change a weight.
TEST(a_model_file_comes_back_byte_for_byte) {
    const std::string path = dir() + "/read.bin", fp32 = dir() + "/fp32.bin";
    std::vector<float> whole = make_weights(kEndOften);
    std::vector<uint16_t> half;  // bf16 is an fp32's upper half
    for (float& w : whole) {
        uint32_t bits;
        std::memcpy(&bits, &w, sizeof bits);
        half.push_back(static_cast<uint16_t>(bits >> 16));
        bits &= 0xFFFF0000;
        std::memcpy(&w, &bits, sizeof bits);
    }
    const std::pair<std::string, std::string> cases[] = {
        {read_file(small_model()), read_file(small_model())},
        {model_header(5) + bytes_of(half), model_header(3) + bytes_of(whole)}};
    for (const auto& [given, wanted] : cases) {
        const std::string out = dir() + "/back_" + std::to_string(given.size());
        write_file(path, given), write_file(fp32, wanted);
        CHECK_RUN(run(options(1) + "-v 0 -s 0 -u 0 -l 1e-30 -o " + out + " -e " + path), 0, "checkpoint");
        check_same(fp32, model_path(out, 1));
    }
}

// A model whose vocabulary has no end of a text trains, without samples.
TEST(a_model_that_cannot_write_trains) {
    const std::string path = dir() + "/no_end.bin", out = dir() + "/no_end";
    write_file(path, model_header(3, NH, 256) + bytes_of(make_weights(kEndOften)));  // 256 bytes and nothing else
    const std::string data = write_shard(dir() + "/sevens.bin", std::vector<int>(100, 7));
    CHECK_RUN(run(options(2) + "-v 1 -s 1 -e " + path + " -i " + data + " -j " + data + " -o " + out), 0, "checkpoint");
    check_rows(out, expected_rows(2, 1, 0, false));
}

// Checks where each tensor lies. A NaN at its first or its last element is found in that tensor, and in that layer.
TEST(every_tensor_has_its_place_in_the_file) {
    const std::string whole = read_file(small_model()), path = dir() + "/nan.bin";
    const float nan = NAN;
    for (int t = WTE; t <= LNFB; t++) {
        const TensorInFile& tensor = kTensors[t];
        // wte's last rows only pad the vocabulary, and are not used.
        const size_t last = offset_of(t) + (t == WTE ? V * C : tensor.layers * tensor.size) - 1;
        for (const size_t at : {offset_of(t), last}) {
            std::string bytes = whole;
            std::memcpy(&bytes[1024 + 4 * at], &nan, 4);
            write_file(path, bytes);
            const int layer = at == last ? L - 1 : 0;
            const std::string place = tensor.name + (tensor.layers > 1 ? format(" of layer %d (", layer) : " (");
            const Result r = run(options(1) + format("-v 0 -s 0 -t %d -d %d -e ", kPositions, 2 * kPositions) + path);
            CHECK_RUN(r, 1, "not finite: " + place);
            CHECK(contains(r.out, "step 1: loss nan") && contains(r.out, "last good checkpoint: none"));
        }
    }
    CHECK(whole.size() == 1024 + 4 * kParameters);
}

TEST_MAIN
