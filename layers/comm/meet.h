// The ranks of a job meet once, before anything else. They find out whether they belong together, and get from rank 0
// what NCCL needs to connect them.
//
// Rank 0 listens at MASTER_ADDR:MASTER_PORT. Every other rank connects and says which job it means, who it is and its
// fields. No file is used that could be stale. When all are there rank 0 answers, and all connections close. From then
// on nobody listens, so a running job cannot be joined.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "layers/comm/launch.h"

using Fields = std::vector<std::pair<std::string, std::string>>;  // names and values that all ranks must share

struct Meeting {
    int local_rank = 0, local_size = 1;  // among the ranks of this machine
    std::string blob;                    // rank 0's
};
// Throws Error, on every rank that has come, if one does not come in `patience` seconds or has other fields. The
// message names the rank, and the field and who has what. A port that is busy, a stranger that answers and a wrong size
// are Errors too.
Meeting meet(const Place& place, const Fields& fields, const std::string& blob, double patience = 60);

// Listens at this address alone, of IPv4 or IPv6. A host's name may mean another address to others than to this machine,
// so it means all of this machine's IPv4 addresses. Port 0 means any free one.
int listen_at(const std::string& address, int port);
int port_of(int fd);

std::string printable(std::string text);  // what others have sent, fit to be printed
double now();                             // in seconds

