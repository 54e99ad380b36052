#include "parallel/process_group.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>

#include "data/file.h"
#include "parallel/comm.h"

ProcessGroup::ProcessGroup(const RankInfo& self, int size)
    : rank(self.rank), size(size), local_rank(self.local_rank), local_size(self.local_size) {
    if (rank == 0)
        return;
    const int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (null < 0 || dup2(null, STDOUT_FILENO) < 0)
        throw file_error("/dev/null", "open", errno);
    close(null);
}

void ProcessGroup::rendezvous(const RankInfo& self, const Fields& settings, double timeout) {
    const std::string program = InputFile("/proc/self/exe").read_all();
    Fields fields = {{"program", format("%016zx", checksum64(program.data(), program.size()))},
                     {"NCCL", NcclComm::version()}};
    fields.insert(fields.end(), settings.begin(), settings.end());
    nccl_id = ::rendezvous(self, fields, rank == 0 ? NcclComm::new_id() : "");

    watchdog = std::make_unique<Watchdog>(
        [rank = rank] { return format("rank %d at step %d", rank, g_step.load()); });
    watchdog->set_timeout(timeout);
}

int ProcessGroup::device(int gpus) const {
    if (gpus == 1 && std::getenv("CUDA_VISIBLE_DEVICES"))
        return 0;
    if (local_rank < gpus)
        return local_rank;
    throw Error(
        format("rank %d is local rank %d, but this machine has %d GPUs; start fewer ranks on it",
               rank, local_rank, gpus));
}
