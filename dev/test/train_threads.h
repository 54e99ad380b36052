// The program (train_gpt2.cu, included before) with threads as ranks, for tests without a GPU.
// --gpus N makes N threads on the CPU. Each prints, but rank 0 alone writes files.
#pragma once
#include <functional>

#include "dev/common/thread_comm.h"

inline thread_local ThreadComm* this_thread = nullptr;
inline std::function<void(Options&)> change_options_of_rank_1 = [](Options&) {};

// Stands in for NCCL's (parallel/ranks.h).
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
        std::vector<int> codes(std::max(1, o.gpus));
        on_threads(static_cast<int>(codes.size()), [&](int rank, ThreadComm& comm) {
            Options mine = o;
            if (rank == 1)
                change_options_of_rank_1(mine);
            ProcessGroup group;
            group.rank = rank;
            group.size = group.local_size = static_cast<int>(codes.size());
            this_thread = &comm;
            codes[rank] = run_with<Threads, float>(Threads(1), mine, group);
        });
        return codes[0];
    });
}
