// The ranks of a job as they find each other at the start. From then on they talk through NCCL (run/ranks.h).
#pragma once
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>

#include "parallel/comm.h"
#include "parallel/meet.h"
#include "parallel/watchdog.h"
#include "run/ranks.h"
#include "run/settings.h"

// What options and launcher ask for must fit together, and this machine must have it.
inline void check_ranks(const Options& o, const Place& place, int gpus, const std::string& why_no_gpu) {
    const int ranks = std::max(o.gpus, place.size);
    if (ranks % o.context_parallel)
        throw UsageError(format("--context-parallel %d does not divide --gpus %d: use --gpus %d", o.context_parallel,
                                ranks, (ranks / o.context_parallel + 1) * o.context_parallel));
    if (o.context_parallel > 1 && !o.hellaswag.empty())
        throw UsageError("--hellaswag needs whole sequences: leave out --context-parallel");
    if (o.gpus > 0 && place.size > 1 && o.gpus != place.size)
        throw UsageError(format("--gpus %d, but the launcher started %d ranks: leave out --gpus", o.gpus, place.size));
    if (o.generate > 0 && ranks > 1) throw UsageError("--generate runs on one GPU: leave out --gpus");
    if (ranks == 1 || o.memory) return;
    if (o.device == "cpu") throw UsageError("--device cpu has one rank: leave out --gpus");
    if (gpus == 0) throw Error("several ranks need a GPU each: " + why_no_gpu);
    NcclComm::version();  // throws if this program was built without NCCL
}

// This rank in its job, after all have met. They must be the same program with the same options, and rank 0 alone
// prints. --memory needs no other ranks.
struct Team {
    int rank = 0, size = 1, local_rank = 0, local_size = 1;
    std::string nccl_id;
    std::unique_ptr<Watchdog> watchdog;

    Team() = default;
    Team(Options& o, const Place& place)
        : rank(place.rank),
          size(std::max(o.gpus, place.size)),
          local_rank(place.local_rank),
          local_size(place.local_size) {
        if (rank > 0) {
            const int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
            if (null < 0 || dup2(null, STDOUT_FILENO) < 0)
                throw Error("cannot open /dev/null");
            close(null);
        }
        if (size == 1 || o.memory) return;
        const std::string program = InputFile("/proc/self/exe").rest();
        Fields fields = {{"program", format("%016zx", checksum64(program.data(), program.size()))},
                         {"NCCL", NcclComm::version()}};
        std::istringstream settings(options_settings(o.table()));
        for (std::string name, value; settings >> name && std::getline(settings >> std::ws, value);)
            fields.push_back({name, value});
        nccl_id = meet(place, fields, rank == 0 ? NcclComm::new_id() : "");
        watchdog =
            std::make_unique<Watchdog>([rank = rank] { return format("rank %d at step %d", rank, g_step.load()); });
        watchdog->allow(long_timeout(o));
    }
    bool speaks() const { return rank == 0; }  // for all ranks
    // This rank's GPU. A launcher may show each rank only its own.
    int device(int gpus) const {
        if (gpus == 1 && std::getenv("CUDA_VISIBLE_DEVICES")) return 0;
        if (local_rank < gpus) return local_rank;
        throw Error(format("rank %d is number %d on this machine, which has %d GPUs: start fewer ranks", rank,
                           local_rank, gpus));
    }
};

// Connects the ranks of a team, and those that share sequences. The watchdog ends this rank if NCCL finds an error.
template <class Dev>
Ranks<Dev> connect(const Dev& dev, const Team& team, int context) {
    using Comm = typename Dev::Comm;
    Ranks<Dev> ranks;
    ranks.rank = team.rank, ranks.size = team.size, ranks.local_size = team.local_size, ranks.context = context;
    ranks.watchdog = team.watchdog.get();
    if (!ranks.watchdog) return ranks;
    const auto forget = [dog = ranks.watchdog](Comm* comm) {
        dog->ask(nullptr);
        delete comm;
    };
    ranks.comm = std::shared_ptr<Comm>(new Comm(dev, team.rank, team.size, team.nccl_id), forget);
    if (context > 1) ranks.sharers = std::make_shared<Comm>(*ranks.comm, ranks.group() * context, context);
    ranks.watchdog->ask([comm = ranks.comm.get()] { return comm->error(); });
    return ranks;
}

// Runs the body of a rank. If it throws in one of several, the process ends with its message. Nothing is unwound,
// because destructors would wait for other ranks.
template <class Dev, class F>
int as_rank(const Ranks<Dev>& ranks, F body) {
    try {
        return body();
    } catch (const std::exception& e) {
        if (!ranks.watchdog) throw;
        print_error(format("train_gpt2cu: rank %d: %s", ranks.rank, e.what()));
        std::fflush(stdout);
        _exit(exit_code_of(e));
    }
}
