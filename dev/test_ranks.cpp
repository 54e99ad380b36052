// Tests what threads as ranks do where one of them differs. dev/test_recipe compares what ranks compute with fp64, and
// dev/test_program has their checkpoints. Includes the program itself.
//
// Run: ./dev/test_ranks [part of a test's name]
#define TRAIN_GPT2_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"  // parts of the program stay unused here
#include "../train_gpt2.cu"
#include "dev/program.h"
#include "dev/thread_comm.h"

namespace {

struct Grouping {
    int ranks, context;
    bool sharded, overlap;
};

Options options() {
    Options o;
    o.train_data = o.val_data = text_file();
    o.B = 2, o.T = 8, o.tokens_per_step = 8 * o.B * o.T, o.max_steps = 3, o.seed = 3;
    o.lr = 1e-2f, o.warmup = 0;
    return o;
}

// Calls work(run, model) as each rank of a grouping. Each has the options that it makes of `options()`.
void on_ranks(const Grouping& g, const std::function<void(Options&, int rank)>& change,
              const std::function<void(Run<GPT2<Threads, float>>&, GPT2<Threads, float>&)>& work) {
    on_threads(g.ranks, [&](int rank, ThreadComm& comm) {
        Ranks<Threads> ranks;
        ranks.rank = rank, ranks.size = g.ranks, ranks.context = g.context;
        ranks.sharded = g.sharded, ranks.overlap = g.overlap;
        ranks.comm = std::shared_ptr<ThreadComm>(&comm, [](ThreadComm*) {});
        ranks.sharers = std::make_shared<ThreadComm>(comm, ranks.group() * g.context, g.context);
        Options o = options();
        change(o, rank);
        const Threads dev(1);
        GPT2<Threads, float> model(dev, {16, kByteVocab, 384, 2, 2, 32}, Attention::flash, o.B, o.T / g.context,
                                   8 / ranks.groups(), true, 1, ranks);
        Run<GPT2<Threads, float>> run(o, model, {o.train_data, o.val_data});
        model.allocate();
        init_random(model, o.seed);
        work(run, model);
    });
}

}  // namespace

// In a split sequence what is broken reaches the others at once, and no rank may stop before the others do. If the
// optimizer is divided, gathering the parameters heals this break, because another rank owns that element.
TEST(a_rank_that_is_not_finite_is_named_and_no_rank_updates) {
    for (const Grouping& g : {Grouping{2, 1, false, false}, {4, 1, true, true}, {2, 2, false, false}})
        on_ranks(
            g, [](Options&, int) {},
            [&](auto& run, auto& model) {
                if (model.ranks.rank == 1) model.weights(1).ln2w[3] = NAN;
                const std::vector<char> before(model.params.base, model.params.base + model.params.bytes);
                CHECK_ERROR(train_step(run),
                            g.sharded || g.context > 1
                                ? "first tensor that is not finite: "
                                : "finite: ln2w of layer 1 (parameters, 1 of 32 elements) on rank 1; nothing");
                CHECK(model.ranks.rank == 1 || std::memcmp(before.data(), model.params.base, before.size()) == 0);
            });
}

// Differences beside the arguments are found before the first step.
TEST(ranks_that_start_differently_are_refused) {
    const std::string other = dir() + "/other.txt";
    write_file(other, read_file(text_file()).substr(1));
    for (const std::string what : {"parameters", "validation data", "data", "T"}) {
        const std::string error = test::error_of([&] {
            on_ranks(
                {2, 1, false, false},
                [&](Options& o, int rank) {
                    if (rank == 1 && what == "validation data") o.val_data = other;
                    if (rank == 1 && what == "data") o.train_data = other;
                    if (rank == 1 && what == "T") o.T = 4;
                },
                [&](auto& run, auto& model) {
                    if (model.ranks.rank == 1 && what == "parameters")
                        static_cast<float*>(model.params.at(0))[model.num_parameters - 1] += 1e-6f;
                    run.agree();
                });
        });
        CHECK(contains(error, what + ": rank 1"));
    }
}

TEST_MAIN
