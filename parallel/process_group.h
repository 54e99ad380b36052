// This process as one of the ranks of its job, before NCCL connects them (parallel/ranks.h).
#pragma once
#include <memory>
#include <string>

#include "common/field.h"
#include "parallel/rendezvous.h"
#include "parallel/watchdog.h"

struct ProcessGroup {
    int rank = 0;
    int size = 1;
    int local_rank = 0;  // among the ranks on this machine
    int local_size = 1;
    std::string nccl_id;                 // the same on all ranks; set by rendezvous()
    std::unique_ptr<Watchdog> watchdog;  // started by rendezvous(); null without that

    ProcessGroup() = default;  // a single process

    // Redirects stdout to /dev/null unless this is rank 0. `size` may be larger than self.size:
    // --memory asks about a job whose other ranks are not started.
    ProcessGroup(const RankInfo& self, int size);

    // Connects the ranks, which must run the same program with the same version of NCCL and the
    // same `settings`. From then on a rank that makes no progress for `timeout` seconds ends.
    void rendezvous(const RankInfo& self, const Fields& settings, double timeout);

    bool prints() const { return rank == 0; }

    // The GPU of this rank, on a machine with `gpus` visible ones. Some launchers show each rank
    // only one GPU, its own.
    int device(int gpus) const;
};
