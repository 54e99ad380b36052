// This process among the ranks of its job, before they are connected by NCCL (parallel/ranks.h).
#pragma once
#include <memory>
#include <string>

#include "common/field.h"
#include "parallel/rendezvous.h"
#include "parallel/watchdog.h"

struct ProcessGroup {
    int rank = 0;
    int size = 1;
    int local_rank = 0;  // among the ranks of this machine
    int local_size = 1;
    std::string nccl_id;                 // what rendezvous() agrees on
    std::unique_ptr<Watchdog> watchdog;  // of a rank that others wait for

    ProcessGroup() = default;  // a single process
    // Rank 0 alone prints. `size` is also that of a job whose other ranks are not started, because
    // --memory only asks about them.
    ProcessGroup(const Place& place, int size);

    // Connects the ranks, which must be the same program, with the same NCCL and the same
    // `settings`. From then on a rank that makes no progress for `patience` seconds ends.
    void rendezvous(const Place& place, const Fields& settings, double patience);

    bool prints() const { return rank == 0; }

    // The GPU of this rank, on a machine with `gpus` visible ones. A launcher may show each rank
    // only its own.
    int device(int gpus) const;
};
