// How the ranks of a job start and meet. They meet once, before anything else. Each connects to
// rank 0 and says which job it means, who it is and its fields. No file is used that could be
// stale. When all are there rank 0 answers, and all connections close. From then on nobody listens,
// so a running job cannot be joined.
#pragma once
#include <string>
#include <vector>

#include "common/error.h"
#include "common/field.h"

// Who this process is, according to its launcher.
struct Place {
    int rank = 0, size = 1;
    int local_rank = 0, local_size = 1;  // among the ranks of this machine
    int port = 0;                        // where rank 0 listens
    std::string address, job;            // rank 0 refuses ranks of other jobs
};
// Reads the variables of torchrun, Open MPI, MPICH or Slurm. Without any the size is 1. Throws
// UsageError.
Place place_from_environment();

// --gpus N: runs this program N times on this machine, as the ranks of one job. Forwards SIGINT,
// SIGTERM and SIGHUP. When a rank fails the others have five seconds to end. Returns 0 if all ended
// well. Otherwise it returns the exit code of the first rank that a signal killed, or if there is
// none, of the first that failed.
int launch_ranks(int count, char** argv);

// Returns rank 0's blob, with which NCCL connects the ranks. Throws Error, on every rank that has
// come, if one does not come in `patience` seconds or has other fields. The message names the rank,
// and the field and who has what. A port that is busy, a stranger that answers and a wrong size are
// Errors too.
std::string rendezvous(const Place& place, const Fields& fields, const std::string& blob,
                       double patience = 60);

// At this address of IPv4 or IPv6 alone. A name may mean another one to others, so it means all
// IPv4 addresses here.
int listen_at(const std::string& address, int port);
