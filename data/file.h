// Reading files at 64-bit offsets. (Writing: AtomicFile in checkpoint.h.)
#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "data/error.h"

// "out/log.jsonl: cannot write: No space left on device; free some space or choose another directory"
inline Error file_error(const std::string& path, const char* action, int error) {
    const char* advice = "";
    switch (error) {
        case ENOSPC:
        case EDQUOT:
            advice = "; free some space or choose another directory";
            break;
        case EFBIG:
            advice = "; the file would pass a limit of this system or user (ulimit -f)";
            break;
        case EACCES:
        case EPERM:
        case EROFS:
            advice = "; check the permissions or choose another path";
            break;
        case ENOENT:
            advice = "; check the path";
            break;
        case ENOTDIR:
            advice = "; a file stands where the path needs a directory";
            break;
        case EISDIR:
            advice = "; give the path of a file";
            break;
    }
    return Error(format("%s: cannot %s: %s%s", path.c_str(), action, std::strerror(error), advice));
}

struct InputFile {
    explicit InputFile(const std::string& path) : path(path) {
        fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) throw file_error(path, "open", errno);
        struct stat info;
        const int error = fstat(fd, &info) ? errno : S_ISDIR(info.st_mode) ? EISDIR : 0;
        if (error || !S_ISREG(info.st_mode)) {
            close(fd);
            if (error) throw file_error(path, "read", error);
            throw Error(path + ": not a regular file; a pipe or a device cannot be read at offsets, save it as a file");
        }
        size = static_cast<uint64_t>(info.st_size);
    }
    ~InputFile() { close(fd); }
    InputFile(const InputFile&) = delete;
    InputFile& operator=(const InputFile&) = delete;

    void read(uint64_t offset, void* out, size_t bytes) const {
        for (size_t done = 0; done < bytes;) {
            const ssize_t n =
                pread(fd, static_cast<char*>(out) + done, bytes - done, static_cast<off_t>(offset + done));
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) throw file_error(path, "read", errno);
            if (n == 0)
                throw Error(format("%s: truncated: expected %zu bytes at offset %zu, found %zu", path.c_str(), bytes,
                                   offset, done));
            done += static_cast<size_t>(n);
        }
    }

    const std::string path;
    uint64_t size;
    int fd;
};
