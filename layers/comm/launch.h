// How ranks start: by a launcher, which tells them who they are in their environment, or by --gpus N.
#pragma once
#include <string>

#include "layers/gpu/error.h"

// Who this process is, according to its launcher.
struct Place {
    int rank = 0, size = 1;
    int local_rank = -1, local_size = -1;  // among the ranks of this machine, or -1 if the launcher does not say
    std::string address;                   // where rank 0 listens
    int port = 0;
    std::string job;     // the launcher's name for the job; rank 0 refuses a rank with another name
    int listen_fd = -1;  // rank 0 only: a socket that listens at `port` already
};
// Reads the variables of torchrun, Open MPI, MPICH or Slurm. Without any the size is 1. Throws UsageError if they make
// no sense.
Place place_from_environment();

// --gpus N: runs this program N times on this machine, as the ranks of one job. Forwards SIGINT, SIGTERM and SIGHUP.
// When a rank fails the others have five seconds to end. Returns 0 if all ended well. Otherwise it returns the exit
// code of the first rank that a signal killed, or if there is none, of the first that failed.
int launch_ranks(int count, char** argv);

