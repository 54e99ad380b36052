// Tests the program as its users run it. ./train_gpt2cu is a subprocess, and its output, exit codes and files are
// checked. Most tests use --device cpu, so that the loop, data, checkpoints, resume, sampling and errors are tested on
// any machine.
#include <future>
#include <map>
#include <thread>

#include "attention/attention.h"
#include "dev/program.h"
#include "layers/gpu/cuda.h"
#include "run/checkpoint.h"

// Without this the program would start itself once more, to choose how threads wait.
static const bool kOneStart = !setenv("OMP_WAIT_POLICY", "passive", 1);

// A model that has taken one step.
static const std::string& model() {
    static const std::string out = dir() + "/model", path = model_path(out, 1);
    if (!exists(path)) CHECK_RUN(run(tiny() + "-x 1 -o " + out), 0, "checkpoint");
    return path;
}

// Each row has an option's letter, the name of its value, its range and default as --help has them, and three values. A
// run must show these as its settings. No two options have the same three, so none can stand for another.
TEST(every_option_sets_what_it_names) {
    struct Row {
        const char *name, *letter, *value;
        std::string help;
        std::string a, b, c;  // "" if not given
    };
    const std::string text = text_file(), copy = dir() + "/copy.txt", out = dir() + "/options";
    std::filesystem::copy_file(text, copy);
    const std::vector<Row> rows = {
        {"--train-data", "-i", " TEXT", "", text, copy, text},
        {"--val-data", "-j", " TEXT", "", copy, text, text},
        {"--init", "-e", " TEXT", "(default auto)", "tiny", model(), "tiny"},
        {"--precision", "", " NAME", "(auto|bf16|fp32; default auto)", "fp32", "auto", "fp32"},
        {"--attention", "", " NAME", format("(%s; default flash)", attention_names()), "naive", "flash", "flash"},
        {"--device", "", " NAME", "(auto|cuda|cpu; default auto)", "cpu", "cpu", "cpu"},
        {"--no-graph", "", "", "", "1", "0", "0"},
        {"--recompute", "-r", " N", "(0..2; default 1)", "2", "0", "1"},
        {"--no-tf32", "", "", "", "0", "1", "0"},
        {"--gpus", "", " N", "(0..1024; default 0)", "1", "0", "0"},
        {"--zero", "", " N", "(-1..1; default -1)", "0", "1", "0"},
        {"--overlap", "", " N", "(-1..1; default -1)", "0", "0", "1"},
        {"--context-parallel", "", " N", "(1..1024; default 1)", "", "", "1"},
        {"--batch", "-b", " N", "(0..65536; default 0)", "3", "4", "5"},
        {"--tokens", "-t", " N", "(0..4194304; default 0)", "16", "12", "8"},
        {"--tokens-per-step", "-d", " N", "(0..; default 0)", "96", "48", "80"},
        {"--max-steps", "-x", " N", "(-1..; default -1)", "2", "1", "1"},
        {"--no-shuffle", "", "", "", "0", "0", "1"},
        {"--overfit", "-a", "", "", "1", "1", "0"},
        {"--lr", "-l", " X", "(0..; default 0)", "0.0011", "0.0012", "0.0013"},
        {"--warmup", "-u", " N", "(-1..; default -1)", "21", "22", "23"},
        {"--final-lr", "-q", " X", "(0..1; default 0.1)", "0.31", "0.32", "0.33"},
        {"--schedule", "-k", " NAME", "(cosine|linear|constant|wsd; default cosine)", "wsd", "linear", "constant"},
        {"--weight-decay", "-c", " X", "(0..; default 0.1)", "0.41", "0.42", "0.43"},
        {"--beta2", "", " X", "(0..0.99999; default 0.95)", "0.51", "0.52", "0.99999"},
        {"--max-norm", "", " X", "(0..; default 1)", "0.61", "0.62", "0.63"},
        {"--seed", "", " N", "(0..; default 1)", "71", "72", "2147483647"},
        {"--val-every", "-v", " N", "(-1..; default -1)", "81", "82", "83"},
        {"--val-batches", "-m", " N", "(0..; default 0)", "7", "8", "9"},
        {"--hellaswag", "", " TEXT", "", "", "", ""},
        {"--eval-only", "", "", "", "0", "", "0"},
        {"--sample-every", "-s", " N", "(-1..; default -1)", "91", "92", "93"},
        {"--sample-length", "-g", " N", "(1..; default 700)", "10", "6", "3"},
        {"--memory", "", "", "", "0", "", "0"},
        {"--profile", "", " N", "(0..; default 0)", "0", "", "0"},
        {"--output-dir", "-o", " TEXT", "", out + "/a", out + "/b", out + "/c"},
        {"--checkpoint-every", "-n", " N", "(0..; default 0)", "31", "32", "33"},
        {"--keep", "-nk", " N", "(0..; default 0)", "41", "42", "43"},
        {"--resume", "-y", "", "", "0", "1", "1"},
        {"--tokenizer", "", " TEXT", "", "", "", ""},
        {"--generate", "", " N", "(0..; default 0)", "0", "", "0"},
        {"--prompt", "", " TEXT", "", "Ah", "Oh", "Eh"},
        {"--temperature", "", " X", "(0..; default 1)", "0.71", "0.72", "0.73"},
        {"--top-k", "", " N", "(0..; default 0)", "51", "52", "53"}};
    std::string help = run("--help").out, flat;
    for (const char c : help)  // one space for each stretch of white space
        if (!std::isspace(c) || flat.empty() || flat.back() != ' ') flat += std::isspace(c) ? ' ' : c;
    size_t at = 0;
    for (size_t i = 0; i < rows.size(); i++) {
        const Row& r = rows[i];
        const std::string left = format(" %s%s%s%s ", r.letter, *r.letter ? ", " : "", r.name, r.value);
        at = flat.find(left, at);
        const size_t end = i + 1 < rows.size() ? flat.find(rows[i + 1].name, at) : flat.size();
        if (at == std::string::npos || !contains(flat.substr(at, end - at), r.help) ||
            (r.help.empty() && contains(flat.substr(at, end - at), "default ")))
            return test::report(__FILE__, __LINE__,
                                format("no \"%s … %s\" in %s", left.c_str(), r.help.c_str(), help.c_str()));
    }
    CHECK(std::count(help.begin(), help.end(), '\n') > 50 && flat.find(" --", at + 8) == std::string::npos);  // no more

    for (const auto member : {&Row::a, &Row::b, &Row::c}) {
        std::string command;
        for (const Row& r : rows) {
            const bool letter = member == &Row::b && *r.letter;
            if (const std::string& value = r.*member; !value.empty())
                command += (letter ? r.letter : r.name) + std::string(member == &Row::c ? "=" : " ") + value + " ";
        }
        const Result r = run(command);
        for (const Row& row : rows) {
            const std::string& value = row.*member;
            if (value.empty()) continue;
            const std::string shown = *row.value ? value : value == "1" ? "on" : "off";
            if (!contains("\n" + r.out, format("\n%-18s  %s\n", row.name, shown.c_str())))
                test::report(__FILE__, __LINE__,
                             format("%s: expected %s in %s", row.name, shown.c_str(), r.out.substr(0, 1500).c_str()));
        }
        CHECK_RUN(r, 0, "step 1/");
    }
}

// dev/test_data has all errors of parsing.
TEST(usage_errors_exit_with_2) {
    CHECK_RUN(run("--btach 4"), 2, "train_gpt2cu: unknown option --btach (did you mean --batch?)");
    CHECK_RUN(run("-b -1"), 2, "\"-1\" is out of range 0..65536");
    CHECK_RUN(run("--attention magic"), 2, "\"magic\" is not one of flash|naive|flash_simple|");
    CHECK_RUN(run("--device cpu --attention flash_simple"), 2, "--attention flash_simple needs a GPU");
    CHECK_RUN(run("--device cpu -e d13"), 2, "--init d13: neither d12");
    CHECK_RUN(run("--device cpu --precision bf16"), 2, "--precision bf16 needs a GPU");
    CHECK_RUN(run("--device cpu --generate 5"), 2, "--generate needs a trained model");
    CHECK_RUN(run("--device cpu --eval-only"), 2, "--eval-only needs a model");
    for (const char* option : {"-y 1", "-n 5", "-nk 5"})
        CHECK_RUN(run(tiny() + option), 2, "need a directory: give it with -o");
    CHECK_RUN(run(tiny() + "--profile 1 -o x"), 2, "--profile writes nothing");
    CHECK_RUN(run(tiny() + "--beta2 1"), 2, "--beta2: \"1\" is out of range 0..0.99999");
    CHECK_RUN(run("--device cpu -e tiny -b 65536 -t 65536 --memory"), 2, "too many tokens");
    CHECK_RUN(run(tiny() + "-d 100"), 2, "not a multiple");
    CHECK_RUN(run("--device cpu --eval-only -e " + model() + " -i " + text_file()), 2, "-j");
}

TEST(errors_exit_with_1_and_one_line) {
    const std::string long_context = tiny() + "-t 300 -e " + model();
    CHECK_RUN(run(long_context), 1, "beyond the model's 256 positions");
    CHECK_RUN(run(tiny() + "-t 300 -x 1"), 0, "300 positions");
    CHECK_RUN(run("--device cpu -i '" + dir() + "/none_*.bin'"), 1, "none_*.bin");
    write_file(dir() + "/short.txt", "Too short.");
    CHECK_RUN(run("--device cpu -i " + dir() + "/short.txt"), 1, "short.txt");
    write_file(dir() + "/bad.bin", std::string(2000, 'x'));
    CHECK_RUN(run("--device cpu -i " + dir() + "/bad.bin"), 1, "20240520");
    CHECK_RUN(run("--device cpu -e " + dir() + "/bad.bin"), 1, "20240326");
    CHECK_RUN(run("--device cpu --eval-only -e " + model() + " --hellaswag " + text_file()), 1, "20240522");
    const std::string greedy = "--device cpu --generate 5 --temperature 0 -e " + model(), text = run(greedy).out;
    CHECK(text.size() > 1 && run(greedy + " -t 300").out == text);  // 5 tokens need no 300 positions
    if (Cuda::count() == 0) CHECK_RUN(run(tiny() + "-x 1 --device cuda"), 1, "; use --device cpu");
    const Result r = run(long_context);
    const std::string last = r.out.substr(r.out.find("train_gpt2cu:"));
    CHECK(std::count(last.begin(), last.end(), '\n') == 1);
}

// Without -x a run takes one pass over the text. 1000 bytes and the token before them are 15 steps of 64 and a rest.
TEST(trains_for_one_epoch_of_own_data) {
    write_file(dir() + "/thousand.txt", read_file(text_file()).substr(0, 1000));
    CHECK_RUN(run("--device cpu -e tiny -b 1 -t 64 -v 0 -s 0 -i " + dir() + "/thousand.txt"), 0, "step 15/15 | loss ");
}

TEST(memory_table_and_profile) {
    // d12 has C = 768 and L = NH = 12. In a layer a token's floats are qkv (3C), atty, residual2, fch (4C), residual3,
    // two statistics of each layer norm and NH of lse. Outside the layers they are encoded, and lnf with its two. The
    // layer norms' outputs (C each) and GELU's (4C) are kept for each layer, or once.
    const int C = 768, L = 12, fixed = L * ((3 + 1 + 1 + 4 + 1) * C + 4 + 12) + 2 * C + 2;
    const int floats[3] = {fixed + L * 2 * C + L * 4 * C, fixed + L * 2 * C + 4 * C, fixed + 2 * C + 4 * C};
    for (int recompute = 0; recompute <= 2; recompute++) {
        const Result r = run(format("--device cpu -e d12 --memory -r %d", recompute));
        CHECK_RUN(r, 0, format(" %d.0\n", 4 * floats[recompute]));
        CHECK(contains(r.out, "parameters   qkvw       fp32      12       21233664        81.00 "));  // 3C·C·L
    }
    // What is listed adds up to the total (every element has 4 bytes here), and a run reports the same total.
    std::map<std::string, double> listed;
    const std::string table = run(tiny() + "--memory").out;
    std::istringstream lines(table);
    for (std::string line; std::getline(lines, line);) {
        char arena[100];
        double elements = 0, size = 0;
        if (std::sscanf(line.c_str(), "%99s %*s %*[fpi32] %*d %lf %lf", arena, &elements, &size) != 3) continue;
        CHECK_NEAR(size, elements * 4 / (1 << 20), 0.006);
        listed[arena] += elements * 4 / (1 << 20), listed["total"] += elements * 4 / (1 << 20);
    }
    CHECK(listed.size() == 6 && listed["total"] > 10);
    CHECK_NEAR(number_after(table, "total, and activations per token "), listed["total"], 0.02);
    const std::string described = run(tiny() + "-x 0").out;
    for (const auto& [name, size] : listed) CHECK_NEAR(number_after(described, "\n  " + name + " "), size, 0.06);
    const Result p = run(tiny() + "--profile 2");
    CHECK(p.code == 0 && contains(p.out, "step 7/7 |"));
}

// On GPUs 10 steps and 10 resumed steps equal 20 straight ones in parameters, optimizer and position in the data.
// dev/test_resume has more, on the CPU.
TEST(resume_is_bit_exact_gpu) {
    if (!has_gpu()) SKIP("no GPU");
    for (const std::string precision : {"bf16", "fp32"}) {
        const std::string straight = dir() + "/straight_" + precision, resumed = dir() + "/resumed_" + precision;
        const std::string options = "-e tiny -b 2 -t 64 -d 256 -v 0 -s 0 -k constant -u 0 -i " + text_file() +
                                    " --precision " + precision + " -o ";
        CHECK_RUN(run(options + straight + " -x 20"), 0, "step 20/20");
        CHECK_RUN(run(options + resumed + " -x 10"), 0, "step 10/10");
        CHECK_RUN(run(options + resumed + " -x 20 -y 1"), 0, "resumed at step 10");
        for (const auto& path : {model_path, state_path}) {
            const std::string whole = read_file(path(straight, 20));
            CHECK(!whole.empty() && whole == read_file(path(resumed, 20)));
        }
    }
}

// Both interrupts come in the second step, the second one when a second has passed.
TEST(a_second_interrupt_a_second_later_ends_the_step) {
    const std::string out = dir() + "/second";
    const Result r =
        run_and_act("--device cpu -e tiny -b 64 -t 256 -v 0 -s 0 -x 9 -i " + text_file() + " -o " + out, "step 1/",
                    "kill -s CONT $pid; sleep 0.1; kill -s INT $pid; sleep 0.01; kill -s STOP $pid; sleep 1.2; "
                    "kill -s INT $pid");
    CHECK(r.code == 130 && !contains(r.out, "interrupted at step") && newest_checkpoint(out) == -1);
}

// dev/test_resume has a full disk.
TEST(output_directories) {
    CHECK_RUN(run(tiny() + "-x 1 -o " + text_file() + "/below_a_file"), 1, "below_a_file");
    const std::string logged = dir() + "/logged";
    std::filesystem::create_directory(logged);
    write_file(logged + "/log.jsonl", "{}\n");
    CHECK_RUN(run(tiny() + "-x 1 -o " + logged), 1, "a log of an earlier run");
    CHECK(read_file(logged + "/log.jsonl") == "{}\n");
    write_file(logged + "/log.jsonl", "");
    CHECK_RUN(run(tiny() + "-x 1 -o " + logged), 0, "checkpoint");
    CHECK_RUN(run(tiny() + "-x 1 -o " + dir() + "/new/and/deep"), 0, "checkpoint");
}

// ---------------------------------------------------------------------------------------------------------------------
// Several ranks are processes on the CPU, and GPUs if there are at least two. What CPU ranks compute is checked
// elsewhere: dev/test_recipe compares it with fp64, and dev/test_ranks with one rank.

namespace {

std::string on_device(const std::string& device) {
    return "--device " + device + " -e tiny -b 1 -t 32 -d 128 -s 0 -i " + text_file() + " -j " + text_file() + " ";
}
std::string ranks_options() {
    return on_device("cpu") + "-k constant -u 0 ";
}

// The same on GPUs. There must be at least two, and the result is how many to use, 2 or 4.
std::string gpu_options() {
    return on_device("cuda") + "-k constant -u 6 -l 1e-3 ";
}
int two_gpus() {
    const int gpus = Cuda::count();
    if (gpus < 2) SKIP("%d GPUs", gpus);
    return gpus < 4 ? 2 : 4;
}

// The largest |a − b|/b. NaN stays NaN.
double apart(const std::vector<double>& a, const std::vector<double>& b) {
    double worst = 0;
    for (size_t i = 0; i < std::min(a.size(), b.size()); i++)
        if (const double x = std::fabs(a[i] - b[i]) / b[i]; !(x <= worst)) worst = x;
    return worst;
}
// Both logs must have `count` such numbers, with |a − b| ≤ tolerance·b.
void check_close(const std::string& run, const std::string& other, const char* kind, const char* key, size_t count,
                 double tolerance) {
    const std::vector<double> a = values(dir() + "/" + run, kind, key), b = values(dir() + "/" + other, kind, key);
    const double worst = apart(a, b);
    if (a.size() != count || b.size() != count || !(worst <= tolerance))
        test::report(__FILE__, __LINE__,
                     format("%s of %s and %s: %zu and %zu of %zu values, apart by up to %.1e, at most %.1e expected",
                            key, run.c_str(), other.c_str(), a.size(), b.size(), count, worst, tolerance));
}

// A shell prefix that makes the following program rank `rank` of `size`.
std::string as_rank(int rank, int size, int port) {
    return format("MASTER_ADDR=127.0.0.1 MASTER_PORT=%d RANK=%d WORLD_SIZE=%d ", port, rank, size);
}

}  // namespace

TEST(ranks_say_how_they_work) {
    const struct {
        int ranks;
        std::string options, printed;
    } cases[] = {{2, "--zero 0 --overlap 0", "optimizer on each, gradients summed after backward"},
                 {2, "--zero 0 --overlap 1", "optimizer on each, gradients summed beside backward"},
                 {4, "", "optimizer divided among them, gradients summed after backward"},
                 {3, "-d 96", "optimizer on each, gradients summed after"},  // three do not divide 128 channels
                 {2, "--context-parallel 2", "sequences divided among 2"}};
    CHECK(run(ranks_options() + "-x 2 -v 2 -m 5 -o " + dir() + "/alone").code == 0);
    for (size_t i = 0; i < std::size(cases); i++) {
        const auto& c = cases[i];
        const std::string name = format("ranks_%zu", i);
        const Result r = run(ranks_options() + format("-x 2 -v 2 -m 5 --gpus %d ", c.ranks) + c.options + " -o " +
                             dir() + "/" + name);
        CHECK_RUN(r, 0, c.printed);
        if (!contains(c.options, "context"))  // before any update the number of ranks changes no bit
            CHECK(values(dir() + "/" + name, "val", "loss_nats").at(0) ==
                  values(dir() + "/alone", "val", "loss_nats").at(0));
        CHECK(contains(r.out, format("ranks              %d, %d on this machine", c.ranks, c.ranks)));
        const int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / c.ranks);
        CHECK(contains(r.out, format("device             CPU, %d thread", threads)));
        CHECK(contains(r.out, "step 2/2") && r.out.find("step 1/2") == r.out.rfind("step 1/2"));  // one of them prints
    }
}

TEST(gpus_train_as_one) {
    const int gpus = two_gpus();
    for (const char* precision : {"fp32 --no-tf32", "bf16"}) {
        const std::string options = gpu_options() + "-x 20 -v 10 -m 5 --precision " + precision + " ",
                          one = format("gpu_%.4s", precision);
        const double tolerance = precision[0] == 'f' ? 1e-3 : 2e-2;
        CHECK(run(options + "-o " + dir() + "/" + one).code == 0);
        for (int ranks = 2; ranks <= gpus; ranks *= 2)
            for (int choice : precision[0] == 'f' ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{1, 2}) {
                const std::string name = one + format("_%d_%d", ranks, choice);
                CHECK_RUN(run(options + format("--gpus %d --zero %d --overlap %d -o ", ranks, choice / 2, choice % 2) +
                              dir() + "/" + name),
                          0, "step 20/20");
                check_close(name, one, "train", "loss_nats", 20, tolerance);
                check_close(name, one, "val", "loss_nats", 3, tolerance);
            }
    }
}

// Saves on `most` ranks and resumes on one, then on two. The losses must equal those of one rank that never stopped.
static void check_regrouped(const std::string& options, int most, double tolerance, const std::string& name) {
    const std::string out = dir() + "/re" + name;
    CHECK(run(options + "-v 0 -x 12 -o " + dir() + "/" + name).code == 0);
    CHECK_RUN(run(options + format("-v 0 -x 4 --gpus %d -o ", most) + out), 0, "divided among them");
    CHECK_RUN(run(options + "-v 0 -x 8 -y 1 -o " + out), 0, "resumed at step 4");
    CHECK_RUN(run(options + "-v 0 -x 12 -y 1 --gpus 2 -o " + out), 0, "resumed at step 8");
    check_close("re" + name, name, "train", "loss_nats", 12, tolerance);
}
// In bf16 a tiny model's losses diverge soon after any difference, but by no more than with another seed.
TEST(gpus_share_sequences) {
    const int gpus = two_gpus();
    for (const char* precision : {"fp32 --no-tf32", "bf16"}) {
        const bool fp32 = precision[0] == 'f';
        const std::string options =
                              gpu_options() + "-b 2 -t 256 -d 1024 -x 20 -v 10 -m 5 --precision " + precision + " ",
                          one = format("whole_%.4s", precision), other_seed = one + "_seed";
        CHECK(run(options + "-o " + dir() + "/" + one).code == 0);
        CHECK(run(options + "--seed 2 -o " + dir() + "/" + other_seed).code == 0);
        for (const auto& c : {std::pair<int, int>{2, 2}, {4, 4}, {4, 2}}) {
            if (c.first > gpus) continue;
            const std::string name = one + format("_%d_%d", c.first, c.second);
            const std::string ranks = format("--gpus %d --context-parallel %d -o ", c.first, c.second);
            CHECK_RUN(run(options + ranks + dir() + "/" + name), 0, "step 20/20");
            for (const auto& [kind, count] : {std::pair<const char*, size_t>{"train", 20}, {"val", 3}})
                check_close(name, one, kind, "loss_nats", count,
                            fp32 ? 1e-3
                                 : apart(values(dir() + "/" + other_seed, kind, "loss_nats"),
                                         values(dir() + "/" + one, kind, "loss_nats")));
        }
    }
}

TEST(checkpoints_do_not_depend_on_the_number_of_ranks) {
    check_regrouped(ranks_options(), 4, 1e-4, "grouped");
    CHECK_RUN(run("--device cpu --generate 5 -e " + model_path(dir() + "/regrouped", 12)), 0, "");
}
TEST(checkpoints_do_not_depend_on_the_number_of_gpus) {
    check_regrouped(gpu_options() + "--precision bf16 ", two_gpus(), 2e-2, "gpu_grouped");
}
TEST(usage_errors_of_ranks) {
    CHECK_RUN(run(ranks_options() + "--gpus 3"), 2, "B·T·ranks");
    CHECK_RUN(run(ranks_options() + "--gpus 3 -d 96 --zero 1"), 2, "--zero 0");
    CHECK_RUN(run("--device cpu --generate 5 -e x --gpus 2"), 2, "--generate");
    CHECK_RUN(run(ranks_options() + "--gpus 4 --context-parallel 3"), 2, "use --gpus 6");
    CHECK_RUN(run(ranks_options() + "--context-parallel 2"), 2, "use --gpus 2");
    CHECK_RUN(run(ranks_options() + "-t 36 --gpus 4 --context-parallel 4"), 2, "use -t 32");
    CHECK_RUN(run(ranks_options() + "--gpus 2 --context-parallel 2 --attention naive"), 2, "--attention flash");
    CHECK_RUN(run(ranks_options() + "--gpus 2 --context-parallel 2 --hellaswag x"), 2, "--hellaswag");
    CHECK_RUN(shell(as_rank(0, 3, 29999) + "./train_gpt2cu --device cpu --gpus 2"), 2, "started 3 ranks");
    CHECK_RUN(shell("RANK=1 WORLD_SIZE=3 ./train_gpt2cu --device cpu"), 2, "MASTER_ADDR");
    CHECK_RUN(run("--device cpu --gpus 2 -e tiny -i " + dir() + "/nothing.txt"), 1, "nothing.txt");
}

// Kills a rank while checkpoints are written without a pause. Whatever was cut off, what is left must be whole.
static void check_killed(const std::string& options, int ranks, const std::string& name) {
    for (const char* victim : {"head -n 1", "tail -n 1"}) {
        const std::string out = dir() + "/" + name + std::string(victim, 4);
        const Result r =
            run_and_act(options + format("-v 0 -x 1000000 -n 1 -nk 3 --gpus %d -o ", ranks) + out, "step 5/",
                        format("victim=$(ranks | %s); echo victim $victim; kill -9 $victim", victim));
        CHECK(r.code == 137);
        const int pid = static_cast<int>(number_after(r.out, "victim "));
        // The parent says it at once, and does not wait for silence.
        CHECK(contains(r.out, format("rank %d (pid %d on", victim[0] == 'h' ? 0 : ranks - 1, pid)) &&
              contains(r.out, ") died: "));
        CHECK(shell("pgrep -f 'gpt2c[u].*" + out + "'").out.empty());  // nobody is left
        const int step = newest_checkpoint(out);
        CHECK_RUN(run(options + format("-v 0 -x %d -y 1 -o ", step + 1) + out), 0, format("resumed at step %d", step));
    }
}
TEST(a_killed_rank_ends_the_job) {
    check_killed(ranks_options() + "-d 96 ", 3, "killed_");
}
TEST(a_killed_gpu_rank_ends_the_job) {
    check_killed(gpu_options(), two_gpus(), "gpu_killed_");
}

// The ranks have their own group, so that Ctrl-C reaches only the parent. If it dies, each of them must be gone soon,
// or a zombie that waits for a parent to take note.
TEST(a_killed_parent_takes_its_ranks_along) {
    const Result r = run_and_act(
        ranks_options() + "-v 0 -x 1000000 --gpus 2", "step 3/",
        "all=$(ranks); echo ranks $(echo $all | wc -w); "
        "for p in $pid $all; do ps -o pgid= -p $p; done | sort -u | echo groups $(wc -l); kill -9 $pid; "
        "for i in $(seq 100); do living=$(for p in $all; do grep -s '^State:.[RSDT]' /proc/$p/status; done); "
        "[ \"$living\" ] || break; sleep 0.1; done; [ -z \"$living\" ] || { echo some live; kill -9 $all; }");
    CHECK(r.code == 137 && contains(r.out, "ranks 2\n") && contains(r.out, "groups 2\n"));
    CHECK(!contains(r.out, "some live"));
}

// A program that ignores its children's ends passes that on to the programs that it starts.
TEST(a_parent_sees_its_ranks_end_where_that_was_ignored) {
    const std::string ignoring = "timeout 30 env --ignore-signal=CHLD ";
    if (shell(ignoring + "true").code != 0) SKIP("no env that ignores signals");
    const std::string command = ignoring + "./train_gpt2cu " + ranks_options() + "-v 0 -x 1 --gpus 2";
    CHECK_RUN(shell(command), 0, "step 1/1");
    CHECK_RUN(shell(command + " -j none.txt"), 1, "none.txt");
}

// The CPU, and the GPUs if there are two, are tested at the same time, because the silence lasts 20 s.
TEST(a_stopped_rank_ends_the_job) {
    std::vector<std::string> cases = {ranks_options()};
    if (Cuda::count() >= 2) cases.push_back(gpu_options());
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::future<Result>> runs;
    for (const std::string& options : cases)
        runs.push_back(std::async(std::launch::async, run_and_act, options + "-v 0 -x 1000000 --gpus 2", "step 3/",
                                  "kill -STOP $(ranks | tail -n 1)"));
    for (std::future<Result>& ended : runs) {
        const Result r = ended.get();
        CHECK(r.code == 1 && contains(r.out, "rank 1 (pid ") && contains(r.out, "silent for 20 s"));
    }
    CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < 60);
}

TEST(an_interrupt_reaches_all_ranks) {
    const std::string out = dir() + "/interrupt_ranks";
    for (const char* whom : {"$pid", "$(ranks | tail -n 1)"}) {  // the parent, or one of the ranks alone
        const Result r = run_and_act(ranks_options() + "-v 0 -x 1000000 -y 1 --gpus 2 -o " + out, "step ",
                                     std::string("kill -s TERM ") + whom);
        CHECK(r.code == 143 && contains(r.out, "interrupted at step") && contains(r.out, "\ncheckpoint "));
    }
}

TEST(an_error_in_one_ranks_data_ends_the_job) {
    std::vector<int> tokens(8 * 64 + 1, 7);
    tokens[5 * 64 + 10] = 9999;  // in the sixth window, which is rank 1's third
    const Result r = run("--device cpu -e tiny -b 1 -t 64 -v 0 -s 0 --no-shuffle --gpus 2 -x 4 -i " +
                         write_shard(dir() + "/late_ranks.bin", tokens));
    CHECK_RUN(r, 1, "9999");
    // In step 2 rank 1 has an error after it had its sums. Rank 0 may or may not print something before that error ends
    // it.
    CHECK(contains(r.out, "step 1/4") && !contains(r.out, "step 3/4") && contains(r.out, "rank 1 (pid "));
}

static void check_differing(const std::string& device) {
    const std::string program = std::filesystem::current_path().string() + "/train_gpt2cu";
    const std::string here = dir() + "/here_" + device, there = dir() + "/there_" + device;
    for (const std::string& folder : {here, there}) std::filesystem::create_directory(folder);
    std::filesystem::copy_file(program, there + "/changed");
    std::ofstream(there + "/changed", std::ios::app) << "x";
    write_file(here + "/book.txt", std::string(3000, 'a'));
    write_file(there + "/book.txt", std::string(2999, 'a') + "b");
    const std::string options = " --device " + device + " -e tiny -b 1 -t 32 -x 2 -v 0 -s 0 -i book.txt ";
    struct Case {
        std::string folder, second, what;
    };
    int port = 20000 + getpid() % 12000;  // below those that Linux gives to connections
    for (const Case& c : {Case{there, there + "/changed", "program: rank 1"}, Case{there, program, "data: rank 1"},
                          Case{here, program + " -l 0.5", "--lr: rank 1"}}) {
        const Result r =
            shell("(cd " + here + " && " + as_rank(0, 2, port) + program + options + ") & (cd " + c.folder + " && " +
                  as_rank(1, 2, port) + c.second + options + "); echo one $?; wait $!; echo zero $?");
        CHECK(contains(r.out, "one 1") && contains(r.out, "zero 1") && contains(r.out, c.what));
        port++;
    }
}
TEST(ranks_that_differ_are_refused) {
    check_differing("cpu");
}
TEST(gpu_ranks_that_differ_are_refused) {
    two_gpus();
    check_differing("cuda");
}

// ---------------------------------------------------------------------------------------------------------------------

// The floor shown is the entropy of the built-in corpus's validation part, which dev/test_corpus recomputes. In 40
// steps a model gets from ln 257 = 5.55 to where it knows the letters' frequencies, nowhere near the floor.
TEST(default_corpus_without_gpu_shows_its_floor) {
    const Corpus corpus = builtin_corpus("data/cache", true);
    const Result r = run("--device cpu -x 40 -b 4 -t 128 -s 0 -v 20 -m 4 -o " + dir() + "/corpus");
    CHECK_RUN(r, 0, "step 40/40 | val loss ");
    for (const char* place : {"step 0/40 | val loss 5.", "step 20/40 | val loss "}) CHECK(contains(r.out, place));
    const double val = number_after(r.out, "val loss ");
    CHECK(val > 2 && val < 4);
    CHECK(contains(r.out, format(" | floor %.4f\n", corpus.val_nats)));
    for (const auto& [kind, count] : {std::pair<const char*, size_t>{"run", 1}, {"val", 3}}) {
        const std::vector<double> floors = values(dir() + "/corpus", kind, "floor_nats");
        CHECK(floors.size() == count);
        for (const double floor : floors) CHECK_NEAR(floor, corpus.val_nats, 1e-12);
    }
    CHECK(contains(r.out, "train data         1 shard, 30.9 M tokens\n"));  // and not the other way round
    CHECK(contains(r.out, "validation data    1 shard, 1.1 M tokens\n"));
    // Data of one's own has no known floor. Training data alone has no validation data.
    const std::string own = "--device cpu -e tiny -x 0 -b 1 -t 16 -s 0 -v 1 -m 1 ";
    const Result val_only = run(own + "-j " + text_file()), train_only = run(own + "-i " + text_file());
    CHECK_RUN(val_only, 0, "train data         1 shard, 30.9 M tokens\nvalidation data    text file, 100318 tokens\n");
    CHECK_RUN(train_only, 0, "train data         text file, 100318 tokens\nmemory\n");
    CHECK(contains(val_only.out, "step 0/0 | val loss 5.") && !contains(val_only.out, "floor"));
    CHECK(!contains(train_only.out, "val loss"));
}

TEST_MAIN
