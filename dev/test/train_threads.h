// The program (train_gpt2.cu, which is included before this file) with threads as ranks, for tests
// without a GPU. --gpus N starts N threads on the CPU. All of them print, but only rank 0 writes
// files.
#pragma once
#include <functional>

#include "dev/common/thread_comm.h"

inline thread_local ThreadComm* this_thread = nullptr;  // this rank's communicator

// A test changes these.
inline std::function<void(Options&)> change_options_of_rank_1 = [](Options&) {};
inline bool has_watchdog = false;  // each rank has one, for which the progress of any rank counts

// Takes the place of connect() in parallel/ranks.h, which uses NCCL.
template <class Dev>
    requires std::is_base_of_v<Threads, Dev>
Ranks<Dev> connect(const Dev&, const ProcessGroup& group, int context) {
    Ranks<Dev> ranks;
    ranks.rank = group.rank;
    ranks.size = group.size;
    ranks.local_size = group.local_size;
    ranks.context = context;
    ranks.watchdog = group.watchdog.get();
    ranks.comm = std::shared_ptr<ThreadComm>(this_thread, [](ThreadComm*) {});
    ranks.context_comm =
        std::make_shared<ThreadComm>(*this_thread, ranks.group() * context, context);
    return ranks;
}

inline int train_on_threads(int argc, char** argv) {
    return run_program("train_threads", [&] {
        Options o;
        std::vector<Option> table = o.table();
        parse_options(argc, argv, table);
        if (o.init.empty())
            o.init = "tiny";

        const int ranks = std::max(1, o.gpus);
        std::vector<int> codes(ranks);
        on_threads(ranks, [&](int rank, ThreadComm& comm) {
            Options mine = o;
            if (rank == 1)
                change_options_of_rank_1(mine);

            ProcessGroup group;
            group.rank = rank;
            group.size = ranks;
            group.local_size = ranks;
            if (has_watchdog)
                group.watchdog = std::make_unique<Watchdog>([] { return std::string("a rank"); });
            this_thread = &comm;
            codes[rank] = run_with<Threads, float>(Threads(1), mine, group);
        });
        return codes[0];
    });
}
