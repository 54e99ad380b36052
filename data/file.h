// Reading files at 64-bit offsets, writing them whole or not at all, and their checksum.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/threads.h"

// llm.c's files begin with 256 int32, of which the first is a magic.
constexpr size_t kHeaderInts = 256, kHeaderBytes = kHeaderInts * sizeof(int32_t);
constexpr int32_t kModelMagic = 20240326, kShardMagic = 20240520;

// Copies a file into this object, from NAME_begin to NAME_end, so that the program is one file and
// runs from any directory. The path is relative to the repository root, where make compiles.
#define EMBED(name, path)                               \
    extern "C" const char name##_begin[], name##_end[]; \
    asm(".pushsection .rodata\n" #name "_begin: .incbin \"" path "\"\n" #name "_end: .popsection")

// "out/log.jsonl: cannot write: No space left on device; free some space or choose another
// directory"
inline Error file_error(const std::string& path, const char* action, int error) {
    const char* const advice =
        error == ENOSPC || error == EDQUOT ? "; free some space or choose another directory"
        : error == EFBIG ? "; the file would pass a limit of this system or user (ulimit -f)"
        : error == EACCES || error == EPERM || error == EROFS
            ? "; check the permissions or choose another path"
        : error == ENOENT  ? "; check the path"
        : error == ENOTDIR ? "; a file stands where the path needs a directory"
        : error == EISDIR  ? "; give the path of a file"
                           : "";
    return Error(format("%s: cannot %s: %s%s", path.c_str(), action, std::strerror(error), advice));
}

// Calls `call`, a function of the system, until no signal interrupts it.
template <class F>
auto uninterrupted(F call) {
    auto result = call();
    while (result < 0 && errno == EINTR)
        result = call();
    return result;
}

// Refuses what exists and is no file before it is opened. Opening a pipe may wait, and a device may
// have no end.
inline void check_regular(const std::string& path) {
    struct stat info;
    if (uninterrupted([&] { return stat(path.c_str(), &info); }) || S_ISREG(info.st_mode))
        return;
    if (S_ISDIR(info.st_mode))
        throw file_error(path, "open", EISDIR);
    throw Error(path + ": not a regular file, but a pipe or a device; give a file");
}

struct InputFile {
    explicit InputFile(const std::string& path) : path(path) {
        check_regular(path);
        fd = uninterrupted([&] { return open(path.c_str(), O_RDONLY | O_CLOEXEC); });
        if (fd < 0)
            throw file_error(path, "open", errno);
        struct stat info;
        if (uninterrupted([&] { return fstat(fd, &info); })) {
            const Error error = file_error(path, "find the size of", errno);
            close(fd);  // a constructor that throws has no destructor
            throw error;
        }
        size = static_cast<uint64_t>(info.st_size);
        if (is_lfs_pointer()) {
            close(fd);
            throw Error(path +
                        ": a Git LFS pointer, not the file itself; fetch it with git lfs pull");
        }
    }
    ~InputFile() { close(fd); }
    InputFile(const InputFile&) = delete;
    InputFile& operator=(const InputFile&) = delete;

    // Throws Error that the file is damaged in this way, unless it is `whole`.
    void require(bool whole, const std::string& otherwise) const {
        if (!whole)
            throw Error(path + ": " + otherwise + "; get the file again");
    }
    void read(uint64_t offset, void* out, size_t bytes) const;
    std::string rest(uint64_t offset = 0) const {  // all bytes from there on
        std::string bytes(size - offset, '\0');
        read(offset, bytes.data(), bytes.size());
        return bytes;
    }

    const std::string path;
    uint64_t size;
    int fd;

  private:
    // Without git-lfs, git leaves a small text in the place of a large file.
    bool is_lfs_pointer() const;
};

// A file or directory that a run keeps open, while somebody may remove its name or give that name
// to another.
class HeldFile {
  public:
    // `otherwise` says in the warning what follows from it.
    HeldFile(const std::string& path, int flags, const char* otherwise);
    ~HeldFile() { close(fd); }
    HeldFile(const HeldFile&) = delete;
    HeldFile& operator=(const HeldFile&) = delete;
    void warn_if_replaced();  // on stderr, once

    const std::string path;
    const int fd;

  private:
    const char* const otherwise_;
    bool warned_ = false;
};

// What a file is called until it is whole.
inline std::string temporary_of(const std::string& path) {
    return format("%s.tmp.%d", path.c_str(), static_cast<int>(getpid()));
}

struct Block {
    const void* data;
    size_t bytes;
};
// Writes a file atomically, from blocks. On failure it throws Error (path, what, errno in words)
// and leaves nothing behind.
void write_whole_file(const std::string& path, const std::vector<Block>& blocks);

// A fast 64-bit hash, the same on every machine.
uint64_t checksum64(const void* data, size_t bytes, uint64_t seed = 0);

// The same of `bytes` bytes that come in pieces. All pieces but the last have a multiple of kStep
// bytes.
class Checksum64 {
  public:
    static constexpr size_t kStep = 32;
    explicit Checksum64(size_t bytes, uint64_t seed = 0);
    void add(const void* piece, size_t bytes);
    uint64_t value() const;

  private:
    uint64_t seed_;
    uint64_t lanes_[4];
};
