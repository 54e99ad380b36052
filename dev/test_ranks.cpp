// Tests the trainer's ranks as threads without a GPU. Whatever the grouping, they train, validate and save as one
// rank does. They compute in fp64, so that a difference is a mistake and no rounding. Includes the program itself.
//
// Run: ./dev/test_ranks [part of a test's name]
#define TRAIN_GPT2_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"  // parts of the program stay unused here
#include <sys/syscall.h>

#include "../train_gpt2.cu"
#include "dev/processes.h"
#include "dev/program.h"
#include "dev/thread_comm.h"

// The program's files are written by this instead of the C library's. An error that is not 0 is what comes of it.
static std::function<int()> before_write = [] { return 0; };
extern "C" ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
    if (const int error = before_write()) return errno = error, -1;
    return syscall(SYS_pwrite64, fd, data, bytes, at);
}

namespace {

const Config kConfig = {16, kByteVocab, 384, 2, 2, 32};
constexpr int kSteps = 3, kMicroBatches = 8, kValBatches = 7;
constexpr int kValBytes = 16 * kValBatches + 11;  // <|endoftext|> and a window more, but no eighth batch
constexpr int kValWindows = kValBytes / 8;

struct Grouping {
    int ranks, context;
    bool sharded, overlap;
    std::string name() const {
        return format("%d ranks, context %d%s%s", ranks, context, sharded ? ", sharded" : "",
                      overlap ? ", overlap" : "");
    }
};
const Grouping kOne = {1, 1, false, false};
const Grouping kGroupings[] = {{2, 1, false, false}, {4, 1, false, true},  {2, 1, true, true}, {4, 1, true, false},
                               {4, 1, true, true},   {2, 2, false, false}, {4, 2, true, true}, {4, 4, true, false}};

Options options() {
    Options o;
    o.train_data = o.val_data = text_file();
    o.B = 2, o.T = 8, o.tokens_per_step = kMicroBatches * o.B * o.T, o.max_steps = kSteps, o.val_batches = kValBatches;
    o.lr = 1e-2f, o.warmup = 0, o.max_norm = 0.5f, o.seed = 3;
    return o;
}

template <class X>
using Model = GPT2<Threads, X>;

// Calls body(ranks) as each rank of a grouping.
void on_grouping(const Grouping& g, const std::function<void(const Ranks<Threads>&)>& body) {
    on_threads(g.ranks, [&](int rank, ThreadComm& comm) {
        Ranks<Threads> ranks;
        ranks.rank = rank, ranks.size = g.ranks, ranks.context = g.context;
        ranks.sharded = g.sharded, ranks.overlap = g.overlap;
        ranks.comm = std::shared_ptr<ThreadComm>(&comm, [](ThreadComm*) {});
        ranks.sharers = std::make_shared<ThreadComm>(comm, ranks.group() * g.context, g.context);
        body(ranks);
    });
}

// Calls work(run, model) as each rank of a grouping. It returns numbers, which must be the same on all ranks.
template <class X, class Work>
std::vector<double> on_ranks(const Grouping& g, const Options& o, Work work) {
    std::vector<std::vector<double>> numbers(g.ranks);
    const std::string error = quiet_error_of([&] {
        on_grouping(g, [&](const Ranks<Threads>& ranks) {
            const Threads dev(1);
            Model<X> model(dev, kConfig, Attention::flash, o.B, o.T / g.context, kMicroBatches / ranks.groups(), true,
                           1, ranks);
            Run<Model<X>> run(o, model, {o.train_data, o.val_data});
            model.allocate();
            init_random(model, o.seed);
            numbers[ranks.rank] = work(run, model);
        });
    });
    if (!error.empty()) throw Error(g.name() + ": " + error);
    for (const std::vector<double>& of_rank : numbers) CHECK(bytes_of(of_rank) == bytes_of(numbers[0]));
    return numbers[0];
}

size_t count_files(const std::string& folder) {
    return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

// The losses of all steps' micro-batches, the norms, three validations, and the parameters.
std::vector<double> train(const Grouping& g) {
    const std::string short_file = dir() + "/short.txt";
    write_file(short_file, read_file(text_file()).substr(0, kValBytes));
    return on_ranks<double>(g, options(), [&](Run<Model<double>>& run, Model<double>& model) {
        Loader val(short_file, 2, 8, kByteVocab, false, 0);
        const Validation first = validate(model, val, 0), few = validate(model, val, 5);
        std::vector<double> numbers(kSteps * kMicroBatches);
        for (int step = 0; step < kSteps; step++) {
            train_step(run);
            // Group j of n has micro-batches j, j + n, …, and each of its ranks has the mean of its own tokens' losses.
            const int groups = g.ranks / g.context, steps = kMicroBatches / groups;
            for (int r = 0; r < g.ranks; r++)
                for (int i = 0; i < steps; i++)
                    numbers[step * kMicroBatches + i * groups + r / g.context] +=
                        model.stats()[r * steps + i] / g.context;
            numbers.push_back(model.stats()[g.ranks * steps]);
        }
        const Validation last = validate(model, val, 1000);
        CHECK(first.windows == kValWindows && few.windows == 10 && last.windows == kValWindows);
        numbers.insert(numbers.end(), {first.loss, few.loss, last.loss});
        const double* parameters = static_cast<const double*>(model.params.at(0));
        numbers.insert(numbers.end(), parameters, parameters + model.num_parameters);
        return numbers;
    });
}

struct Part {
    const char* what;
    size_t count;
    double tolerance;
};
// The parts follow each other in both.
void check_as_one(const Grouping& g, const std::vector<double>& several, const std::vector<double>& one,
                  const std::vector<Part>& parts) {
    size_t at = 0;
    for (const Part& part : parts)
        for (size_t end = at + part.count; at < end; at++)
            if (!(std::fabs(several.at(at) - one.at(at)) <= part.tolerance))
                test::report(
                    __FILE__, __LINE__,
                    format("%s: %s %.15g, one rank has %.15g", g.name().c_str(), part.what, several[at], one[at]));
    CHECK(one.size() == several.size());
}

}  // namespace

TEST(ranks_train_and_validate_as_one) {
    const std::vector<double> one = train(kOne);
    const double *norms = &one.at(kSteps * kMicroBatches), *validations = norms + kSteps;
    CHECK(norms[0] > 0.5 && validations[2] < validations[0]);
    for (const Grouping& g : kGroupings)
        check_as_one(g, train(g), one,
                     {{"a micro-batch's loss", kSteps * kMicroBatches, 1e-11},
                      {"norm", kSteps, 1e-11},
                      {"first validation", 1, 1e-13},
                      {"validation of few batches", 1, 1e-13},
                      {"last validation", 1, 1e-11},
                      {"a parameter", kConfig.num_parameters(), 1e-12}});
}

// The optimizer's state in a checkpoint is what one rank would have. A run that reads it and writes it again writes the
// same bytes, and continues as one rank does.
TEST(ranks_save_and_restore_as_one) {
    Options o = options();
    o.max_steps = kSteps + 1, o.schedule = "constant";
    struct Saved {
        std::string state, model;
        std::vector<double> next;  // loss and norm of the step after
    };
    const auto saved = [&](const Grouping& g, const std::string& name, bool resume) {
        o.output_dir = dir() + "/" + name, o.resume = resume;
        std::filesystem::create_directories(o.output_dir);
        const auto next = on_ranks<float>(g, o, [&](Run<Model<float>>& run, Model<float>& model) {
            if (resume && !run.restore()) throw Error("nothing to restore");
            while (run.step < kSteps) train_step(run);
            run.save();
            train_step(run);
            const uint64_t mine = checksum64(model.params.base, model.params.bytes);
            for (uint64_t of_rank : model.ranks.gather(mine)) CHECK(of_rank == mine);
            const float *losses = model.stats(), *norm = losses + model.num_losses();
            return std::vector<double>{std::accumulate(losses, norm, 0.) / model.num_losses(), *norm};
        });
        return Saved{read_file(state_path(o.output_dir, kSteps)), read_file(model_path(o.output_dir, kSteps)), next};
    };
    const Saved one = saved(kOne, "one", false);
    const auto check_next = [&](const Grouping& g, const Saved& several) {
        check_as_one(g, several.next, one.next,
                     {{"next loss", 1, 1e-5 * one.next.at(0)}, {"next norm", 1, 1e-4 * one.next.at(1)}});
    };
    const Grouping most = {4, 2, true, true};
    const Saved several = saved(most, "most", false);
    check_next(most, several);
    const size_t n = kConfig.num_parameters();
    for (size_t array : {2, 1}) {  // m and v are the file's end
        std::vector<float> a(n), b(n);
        std::memcpy(a.data(), several.state.data() + several.state.size() - array * n * sizeof(float),
                    n * sizeof(float));
        std::memcpy(b.data(), one.state.data() + one.state.size() - array * n * sizeof(float), n * sizeof(float));
        double error = 0, square = 0;
        for (size_t i = 0; i < n; i++) error += std::pow(double(a[i]) - b[i], 2), square += std::pow(double(b[i]), 2);
        CHECK_NEAR(std::sqrt(error / square), 0, 1e-4);
    }
    for (const Grouping& g : {kOne, Grouping{2, 1, false, false}, {2, 1, true, false}, {4, 1, true, true}, most}) {
        const Saved again = saved(g, "most", true);
        CHECK(again.state == several.state && again.model == several.model);
        check_next(g, again);
    }
}

// The files are those of a run that stops at that step. The next checkpoint and the end wait for the one before.
TEST(training_goes_on_while_a_checkpoint_is_written) {
    Options o = options();
    for (const Grouping& g : {kOne, Grouping{2, 1, false, false}, {4, 2, true, true}}) {
        std::vector<std::string> files[2];
        for (const bool goes_on : {false, true}) {
            o.output_dir = dir() + format("/beside_%d_%d", g.ranks, goes_on);
            std::filesystem::create_directory(o.output_dir);
            on_ranks<float>(g, o, [&](Run<Model<float>>& run, Model<float>& model) {
                std::promise<void> disk_is_ready;
                if (model.ranks.rank == 0)
                    before_write = [ready = disk_is_ready.get_future().share()] {
                        ready.wait(), usleep(50000);
                        return 0;
                    };
                if (!goes_on) disk_is_ready.set_value();
                train_step(run);
                run.save();
                if (!goes_on) run.conclude();
                train_step(run);
                train_step(run);
                CHECK(newest_checkpoint(o.output_dir) == (goes_on ? -1 : 1));
                model.ranks.meet();
                if (goes_on) disk_is_ready.set_value();
                run.save();
                CHECK(newest_checkpoint(o.output_dir) >= 1);
                model.ranks.meet();
                model.weights(1).ln2w[3] = NAN;
                const std::string last = "last good checkpoint: " + state_path(o.output_dir, 3);
                CHECK_ERROR(train_step(run), last.c_str());
                CHECK(newest_checkpoint(o.output_dir) == 3);
                return std::vector<double>();
            });
            for (const int step : {1, 3})
                for (const auto& path : {model_path, state_path})
                    files[goes_on].push_back(read_file(path(o.output_dir, step)));
        }
        CHECK(files[0] == files[1] && files[0][1].size() > 1000 && files[0][1] != files[0][3]);
    }
}

// The error is a later step's, or the end's. The checkpoint before stays, and no file is left in part.
TEST(a_checkpoint_that_cannot_be_written_ends_the_run) {
    Options o = options();
    o.output_dir = dir() + "/unwritten", o.max_steps = 1000000;
    std::filesystem::create_directory(o.output_dir);
    on_ranks<float>(kOne, o, [&](Run<Model<float>>& run, Model<float>&) {
        train_step(run);
        run.save();
        run.conclude();
        before_write = [] { return ENOSPC; };
        train_step(run);
        run.save();
        CHECK_ERROR(while (run.step < o.max_steps) train_step(run),
                    "state_00000002.bin: cannot write: No space left on device; free");
        CHECK(run.step < o.max_steps);
        run.save();
        CHECK_ERROR(run.conclude(), format("state_%08d.bin: cannot write", run.step).c_str());
        before_write = [] { return 0; };
        return std::vector<double>();
    });
    CHECK(newest_checkpoint(o.output_dir) == 1 && count_files(o.output_dir) == 2);
}

// Ctrl-C in the middle of the first checkpoint. What is there at the end is what a run without it has.
TEST(an_interrupted_run_waits_for_its_checkpoint) {
    Options o = options();
    o.max_steps = 40, o.checkpoint_every = 1, o.val_every = o.sample_every = 0;
    const auto run = [&](const std::string& name, const std::function<int()>& write) {
        o.output_dir = dir() + "/" + name;
        Processes process;
        process.start([&] {
            before_write = write;
            return run_train<Cpu, float>(Cpu(1), o, kConfig, false, {});
        });
        const int code = process.wait()[0];
        return std::pair(code, process.text());
    };
    const auto [code, text] = run("interrupted", [] {
        static std::atomic<bool> sent;  // model and state have a thread each, and a second signal would end the program
        if (gettid() != getpid() && !sent.exchange(true)) raise(SIGINT);  // the main thread writes the lock
        return usleep(20000), 0;
    });
    const std::string out = o.output_dir;
    const int newest = newest_checkpoint(out);
    const size_t at = text.find("checkpoint " + state_path(out, newest));
    CHECK(code == 128 + SIGINT && newest > 0 && newest < o.max_steps);
    CHECK(at < text.find(format("the model is %s\n", model_path(out, newest).c_str())) && at != std::string::npos);
    CHECK(run("straight", before_write).first == 0);
    for (const auto& path : {model_path, state_path})
        CHECK(read_file(path(out, newest)) == read_file(path(o.output_dir, newest)) && exists(path(out, newest)));
    CHECK(count_files(out) == size_t(2 * newest + 2));  // with the log and the lock
}

// In a split sequence what is broken reaches the others at once, and no rank may stop before the others do. If the
// optimizer is divided, gathering the parameters heals this break, because another rank owns that element.
TEST(no_rank_updates_if_one_is_not_finite) {
    for (const Grouping& g : {Grouping{2, 1, false, false}, {4, 1, true, true}, {2, 2, false, false}})
        on_ranks<float>(g, options(), [&](Run<Model<float>>& run, Model<float>& model) {
            if (model.ranks.rank == 1) model.weights(1).ln2w[3] = NAN;
            const std::vector<char> before(model.params.base, model.params.base + model.params.bytes);
            CHECK_ERROR(train_step(run), "last good checkpoint: none");
            CHECK(model.ranks.rank == 1 || std::memcmp(before.data(), model.params.base, before.size()) == 0);
            return std::vector<double>();
        });
}

// Differences beside the arguments are found before the first step.
TEST(ranks_that_start_differently_are_refused) {
    const std::string other = dir() + "/other.txt";
    write_file(other, read_file(text_file()).substr(1));
    for (const char* what : {"parameters", "validation data", "data"}) {
        const std::string error = quiet_error_of([&] {
            on_grouping({2, 1, false, false}, [&](const Ranks<Threads>& ranks) {
                Options o = options();
                const std::string field = ranks.rank == 1 ? what : "";
                if (field == "validation data") o.val_data = other;
                if (field == "data") o.train_data = other;
                const Threads dev(1);
                Model<float> model(dev, kConfig, Attention::flash, o.B, o.T, 1, true, 1, ranks);
                Run<Model<float>> run(o, model, {o.train_data, o.val_data});
                model.allocate();
                init_random(model, o.seed);
                if (field == "parameters") static_cast<float*>(model.params.at(0))[model.num_parameters - 1] += 1e-6f;
                run.agree();
            });
        });
        CHECK(contains(error, std::string(what) + ": rank 1"));
    }
}

TEST_MAIN
