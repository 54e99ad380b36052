// How the ranks of a job start and find each other.
//
// The rendezvous happens once, before anything else: each rank connects to rank 0 and sends the
// job's name, its rank and its fields. When all have connected, rank 0 sends its answer and every
// connection is closed. From then on nobody listens, so a running job cannot be joined, and no file
// is involved that could be left over from another job.
//
// parallel/launch.cpp has the first two functions, which start ranks, and parallel/rendezvous.cpp
// the others.
#pragma once
#include <string>
#include <vector>

#include "common/error.h"
#include "common/field.h"

// Which rank this process is, according to its launcher.
struct RankInfo {
    int rank = 0;
    int size = 1;
    int local_rank = 0;  // among the ranks on this machine
    int local_size = 1;
    int port = 0;  // where rank 0 listens
    std::string address = {};
    std::string job = {};  // a name that all ranks must know
};

// Reads the variables that torchrun, Open MPI, MPICH or Slurm set. Without any of them this is the
// only rank. Throws UsageError.
RankInfo rank_from_environment();

// --gpus N: runs this program N times on this machine, as the ranks of one job, and passes SIGINT,
// SIGTERM and SIGHUP on to them. If a rank fails, the others have five seconds to exit. Returns 0
// if all succeeded. Otherwise it returns the exit code of the first rank that was killed by a
// signal or, if none was, of the first that failed.
int launch_ranks(int count, char** argv);

// Connects the ranks and returns rank 0's `nccl_id` on all of them. Throws Error on every rank that
// has connected if another one is missing after `timeout` seconds or has different fields; the
// message says which rank, which field, and the two values. It also throws Error if the port is in
// use, if something other than rank 0 answers there, or if ranks disagree on their number.
std::string rendezvous(const RankInfo& self, const Fields& fields, const std::string& nccl_id,
                       double timeout = 60);

// A socket that listens at this IPv4 or IPv6 address only. If `address` is a name other than
// localhost, the socket listens at all IPv4 addresses of this machine, because other machines may
// resolve the name to a different one of them.
int listen_at(const std::string& address, int port);
