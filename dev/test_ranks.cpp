// Tests the trainer's ranks as processes without a GPU. Whatever the grouping, they train, validate and save as one
// rank does. They compute in fp64, so that a difference is a mistake and no rounding. Includes the program itself.
//
// Run: ./dev/test_ranks [part of a test's name]
#define TRAIN_GPT2_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"  // parts of the program stay unused here
#include "../train_gpt2.cu"

#include <sys/mman.h>

#include "dev/program.h"
#include "dev/ranks.h"

namespace {

const Config kConfig = {16, kByteVocab, 384, 2, 2, 32};
constexpr int kSteps = 3, kMicroBatches = 8, kValBatches = 7;
constexpr int kValBytes = 16 * kValBatches + 11;  // <|endoftext|> and a window more, but no eighth batch

struct Grouping {
    int ranks, context;
    bool sharded, overlap;
    std::string name() const {
        return format("%d ranks, context %d%s%s", ranks, context, sharded ? ", sharded" : "", overlap ? ", overlap" : "");
    }
};
const Grouping kOne = {1, 1, false, false};
const Grouping kGroupings[] = {{2, 1, false, false}, {4, 1, false, true}, {2, 1, true, true}, {4, 1, true, false},
                               {4, 1, true, true},   {2, 2, false, false}, {4, 2, true, true}, {4, 4, true, false}};

Options options() {
    Options o;
    o.train_data = o.val_data = text_file();
    o.B = 2, o.T = 8, o.tokens_per_step = kMicroBatches * o.B * o.T, o.max_steps = kSteps, o.val_batches = kValBatches;
    o.lr = 1e-2f, o.warmup = 0, o.max_norm = 0.5f, o.seed = 3;
    return o;
}

// Calls work(run, model) as each rank of a grouping, in processes.
template <class X, class Work>
void on_ranks(const Grouping& g, const Options& o, Work work) {
    ForkedRanks processes(g.ranks, [&](Job& job) {
        const Cpu cpu(1);
        CpuComm comm(cpu, job);
        Ranks<Cpu> ranks;
        ranks.comm = &comm, ranks.rank = job.rank, ranks.size = job.size;
        ranks.sharded = g.sharded, ranks.overlap = g.overlap, ranks.context = g.context;
        CpuComm ring(comm, ranks.group() * g.context, g.context);
        ranks.ring = &ring;
        GPT2<Cpu, X> model(cpu, kConfig, Attention::flash, o.B, o.T / g.context, kMicroBatches / ranks.groups(), true, 1,
                           ranks);
        Run<GPT2<Cpu, X>> run(o, model, {o.train_data, o.val_data}, job);
        model.allocate();
        init_random(model, o.seed);
        work(run, model, job);
        model.leave_ring();
        job.leave();
        return 0;
    });
    for (int code : processes.wait(30))
        if (code != 0) test::report(__FILE__, __LINE__, g.name() + ": " + processes.text());
}

// What a child leaves for its parent.
struct Outcome {
    double loss[kSteps][kMicroBatches], norm[kSteps], val_first, val_few, val_last;
    uint64_t val_batches;
    double parameters[1 << 16];
};
struct Shared {
    Outcome* outcome = static_cast<Outcome*>(
        mmap(nullptr, sizeof(Outcome), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    ~Shared() { munmap(outcome, sizeof *outcome); }
    Outcome* operator->() const { return outcome; }
};

void train(const Grouping& g, const Shared& to) {
    const std::string short_file = dir() + "/short.txt";
    write_file(short_file, read_file(text_file()).substr(0, kValBytes));
    on_ranks<double>(g, options(), [&](Run<GPT2<Cpu, double>>& run, GPT2<Cpu, double>& model, Job& job) {
        Loader val(short_file, 2, 8, kByteVocab, false, 0);
        const auto validated = [&](int batches) { return validate(model, val, batches, job); };
        const Validation first = validated(0), few = validated(5);
        Outcome mine{};
        for (int step = 0; step < kSteps; step++) {
            run.train_step();
            // Group j of n has micro-batches j, j + n, …, and each of its ranks has the mean of its own tokens' losses.
            const int groups = g.ranks / g.context, steps = kMicroBatches / groups;
            for (int r = 0; r < g.ranks; r++)
                for (int i = 0; i < steps; i++)
                    mine.loss[step][i * groups + r / g.context] += model.stats()[r * steps + i] / g.context;
            mine.norm[step] = model.stats()[g.ranks * steps];
        }
        const double* p = static_cast<double*>(model.params.at(0));
        if (model.num_parameters > std::size(mine.parameters)) throw Error("too many parameters");
        std::copy_n(p, model.num_parameters, mine.parameters);
        const Validation last = validated(1000);
        mine.val_first = first.loss, mine.val_few = few.loss, mine.val_last = last.loss;
        mine.val_batches = first.batches == last.batches && few.batches == 5 ? last.batches : 0;
        for (uint64_t sum : job.all_gather(checksum64(&mine, sizeof mine)))
            if (sum != checksum64(&mine, sizeof mine)) throw Error("ranks end with other numbers");
        if (job.rank == 0) *to.outcome = mine;
    });
}

}  // namespace

TEST(ranks_train_and_validate_as_one) {
    const Shared one, several;
    train(kOne, one);
    CHECK(one->norm[0] > 0.5 && one->val_batches == kValBatches && one->val_last < one->val_first);
    for (const Grouping& g : kGroupings) {
        *several.outcome = {};
        train(g, several);
        const auto close = [&](const char* what, double got, double want, double tolerance) {
            if (!(std::fabs(got - want) <= tolerance))
                test::report(__FILE__, __LINE__,
                             format("%s: %s %.15g, one rank has %.15g", g.name().c_str(), what, got, want));
        };
        for (int step = 0; step < kSteps; step++) {
            close("norm", several->norm[step], one->norm[step], 1e-11);
            for (int i = 0; i < kMicroBatches; i++)
                close("a micro-batch's loss", several->loss[step][i], one->loss[step][i], 1e-11);
        }
        close("first validation", several->val_first, one->val_first, 1e-13);
        close("validation of few batches", several->val_few, one->val_few, 1e-13);
        close("last validation", several->val_last, one->val_last, 1e-11);
        close("validation's batches", several->val_batches, kValBatches, 0);
        for (size_t i = 0; i < kConfig.num_parameters(); i++)
            close("a parameter", several->parameters[i], one->parameters[i], 1e-12);
    }
}

// The optimizer's state in a checkpoint is what one rank would have. A run that reads it and writes it again writes the
// same bytes, and continues as one rank does.
TEST(ranks_save_and_restore_as_one) {
    Options o = options();
    o.max_steps = kSteps + 1, o.schedule = "constant";
    const Shared next;
    const auto saved = [&](const Grouping& g, const std::string& name, bool resume) {
        o.output_dir = dir() + "/" + name, o.resume = resume;
        std::filesystem::create_directories(o.output_dir);
        on_ranks<float>(g, o, [&](Run<GPT2<Cpu, float>>& run, GPT2<Cpu, float>& model, Job& job) {
            if (resume && !run.restore()) throw Error("nothing to restore");
            while (run.step < kSteps) run.train_step();
            run.save();
            run.train_step();
            const uint64_t mine = checksum64(model.params.base, model.params.bytes);
            for (uint64_t of_rank : job.all_gather(mine))
                if (of_rank != mine) throw Error("ranks go on with other parameters");
            const size_t losses = model.num_losses();
            next->norm[0] = model.stats()[losses];
            next->val_last = std::accumulate(model.stats(), model.stats() + losses, 0.) / losses;
        });
        return std::pair{read_file(state_path(o.output_dir, kSteps)), read_file(model_path(o.output_dir, kSteps))};
    };
    const size_t n = kConfig.num_parameters();
    const auto optimizer = [&](const std::string& state) {  // m and v, the file's last section
        std::vector<float> adam(2 * n);
        std::memcpy(adam.data(), state.data() + state.size() - adam.size() * sizeof(float), adam.size() * sizeof(float));
        return adam;
    };
    const std::vector<float> one = optimizer(saved(kOne, "one", false).first);
    const double loss = next->val_last, norm = next->norm[0];
    const auto goes_on_as_one = [&](const Grouping& g) {
        if (!(std::fabs(next->val_last - loss) <= 1e-5 * loss && std::fabs(next->norm[0] - norm) <= 1e-4 * norm))
            test::report(__FILE__, __LINE__,
                         format("%s: goes on with loss %g and norm %g, one rank with %g and %g", g.name().c_str(),
                                next->val_last, next->norm[0], loss, norm));
    };
    const Grouping most = {4, 2, true, true};
    const auto files = saved(most, "most", false);
    goes_on_as_one(most);
    const std::vector<float> several = optimizer(files.first);
    for (size_t array = 0; array < 2; array++) {
        double error = 0, norm = 0;
        for (size_t i = array * n; i < (array + 1) * n; i++)
            error += std::pow(double(several[i]) - one[i], 2), norm += std::pow(double(one[i]), 2);
        CHECK_NEAR(std::sqrt(error / norm), 0, 1e-4);
    }
    for (const Grouping& g : {kOne, Grouping{2, 1, false, false}, {2, 1, true, false}, {4, 1, true, true}, most}) {
        CHECK(saved(g, "most", true) == files);
        goes_on_as_one(g);
    }
}

// In a ring what is broken reaches the others at once, and no rank may stop before the others do. If the optimizer is
// divided, gathering the parameters heals this break, because another rank owns that element.
TEST(a_rank_that_is_not_finite_is_named_and_no_rank_updates) {
    for (const Grouping& g : {Grouping{2, 1, false, false}, {4, 1, true, true}, {2, 2, false, false}})
        on_ranks<float>(g, options(), [&](Run<GPT2<Cpu, float>>& run, GPT2<Cpu, float>& model, Job& job) {
            if (job.rank == 1) model.weights(1).ln2w[3] = NAN;
            const std::vector<char> before(model.params.base, model.params.base + model.params.bytes);
            CHECK_ERROR(run.train_step(),
                        g.sharded || g.context > 1
                            ? "first tensor that is not finite: "
                            : "finite: ln2w of layer 1 (parameters, 1 of 32 elements) on rank 1; nothing");
            CHECK(job.rank == 1 || std::memcmp(before.data(), model.params.base, before.size()) == 0);
        });
}

// Differences beside the arguments are found before the first step.
TEST(ranks_that_start_differently_are_refused) {
    const std::string other = dir() + "/other.txt";
    write_file(other, read_file(text_file()).substr(1));
    for (const char* what : {"parameters", "validation data", "data", "T"}) {
        ForkedRanks processes(2, [&](Job& job) {
            Options o = options();
            const std::string field = job.rank == 1 ? what : "";
            if (field == "validation data") o.val_data = other;
            if (field == "data") o.train_data = other;
            if (field == "T") o.T = 4;
            const Cpu cpu(1);
            GPT2<Cpu, float> model(cpu, kConfig, Attention::flash, o.B, o.T, 1, true);
            Run<GPT2<Cpu, float>> run(o, model, {o.train_data, o.val_data}, job);
            model.allocate();
            init_random(model, o.seed);
            if (field == "parameters") static_cast<float*>(model.params.at(0))[model.num_parameters - 1] += 1e-6f;
            agree_on_start(model, run, job);
            return 0;
        });
        check_ended(processes, {1, 1}, {std::string(what) + ": rank 1"});
    }
}

TEST_MAIN
