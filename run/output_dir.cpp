#include "run/output_dir.h"

#include <sys/file.h>
#include <sys/stat.h>

#include <filesystem>

#include "run/checkpoint_files.h"

// The last arguments are the ends of the warnings by warn_if_replaced().
OutputDir::OutputDir(const std::string& path)
    : directory(path, O_PATH | O_DIRECTORY,
                "checkpoints are written to whatever has this path now"),
      lock(path + "/run.lock", O_RDWR | O_CREAT,
           "other runs are no longer kept from writing to this directory") {
    const int failed = uninterrupted([&] { return flock(lock.fd, LOCK_EX | LOCK_NB); });
    if (failed && errno == EWOULDBLOCK)
        throw Error(lock.path +
                    ": another run is using this directory; wait for it to finish, or "
                    "give another -o");
}

std::unique_ptr<OutputDir> prepare_output_dir(const Options& o) {
    std::error_code error;
    std::filesystem::create_directories(o.output_dir, error);
    if (error)
        throw file_error(o.output_dir, "create the directory", error.value());
    check_regular(o.output_dir + "/run.lock");
    auto output = std::make_unique<OutputDir>(o.output_dir);
    if (o.resume) {
        // Only to fail early: throws if files of the checkpoints are missing.
        checkpoint_to_resume(o.output_dir);
        return output;
    }

    struct stat log = {};
    const std::string log_path = o.output_dir + "/log.jsonl";
    if (stat(log_path.c_str(), &log) && errno != ENOENT)
        throw file_error(log_path, "find", errno);
    if (log.st_size > 0 || newest_model(o.output_dir) >= 0)
        throw Error(o.output_dir +
                    ": already contains a run; add -y to resume it, or give another -o");
    return output;
}
