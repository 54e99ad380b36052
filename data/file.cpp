#include "data/file.h"

#include "common/random.h"

// -------------------------------------------------------------------------------------------------
// System calls

static const char* advice_for(int error) {
    switch (error) {
        case ENOSPC:
        case EDQUOT: return "; free some space or choose another directory";
        case EFBIG: return "; the file would exceed a limit of this system or user (ulimit -f)";
        case EACCES:
        case EPERM:
        case EROFS: return "; check the permissions or choose another path";
        case ENOENT: return "; check the path";
        case ENOTDIR: return "; a part of the path is a file, not a directory";
        case EISDIR: return "; give the path of a file";
        default: return "";
    }
}

Error file_error(const std::string& path, const char* action, int error) {
    return Error(format("%s: cannot %s: %s%s", path.c_str(), action, std::strerror(error),
                        advice_for(error)));
}

void check_regular(const std::string& path) {
    struct stat info;
    const bool exists = uninterrupted([&] { return stat(path.c_str(), &info); }) == 0;
    if (!exists || S_ISREG(info.st_mode))
        return;
    if (S_ISDIR(info.st_mode))
        throw file_error(path, "open", EISDIR);
    throw Error(path + ": is a pipe or a device; give a regular file");
}

// -------------------------------------------------------------------------------------------------
// Reading and writing

namespace {

// An open file, from an offset on.
struct OpenFile {
    const std::string& path;  // for messages
    int fd;
    size_t offset;
};

}  // namespace

// Transfers `bytes` bytes between memory and a file by repeated calls of `call`, which is pread or
// pwrite. A large block is divided among several threads, because one thread copies only about
// 2 GB/s to or from the system's page cache.
template <class Call, class Byte>
static void transfer(Call call, const char* action, const OpenFile& file, Byte* memory,
                     size_t bytes) {
    constexpr size_t kThreads = 4;
    constexpr size_t kSmallestPiece = 1 << 20;

    const auto transfer_piece = [&](size_t begin, size_t end) {
        size_t done = begin;
        while (done < end) {
            const ssize_t n = uninterrupted(
                [&] { return call(file.fd, memory + done, end - done, file.offset + done); });
            if (n < 0)
                throw file_error(file.path, action, errno);
            if (n == 0)
                throw Error(format(
                    "%s: truncated: expected %zu bytes at offset %zu, found %zu; get the file "
                    "again",
                    file.path.c_str(), bytes, file.offset, done));
            done += static_cast<size_t>(n);
        }
    };

    const size_t piece = std::max((bytes + kThreads - 1) / kThreads, kSmallestPiece);
    std::vector<std::future<void>> others;
    for (size_t begin = piece; begin < bytes; begin += piece) {
        const size_t end = std::min(begin + piece, bytes);
        others.push_back(start_async([&, begin, end] { transfer_piece(begin, end); }));
    }
    transfer_piece(0, std::min(piece, bytes));
    for (std::future<void>& other : others) {
        other.get();
    }
}

InputFile::InputFile(const std::string& path) : path(path) {
    check_regular(path);
    fd = uninterrupted([&] { return open(path.c_str(), O_RDONLY | O_CLOEXEC); });
    if (fd < 0)
        throw file_error(path, "open", errno);

    // If a constructor throws, no destructor runs, so each error below closes the file itself.
    struct stat info;
    if (uninterrupted([&] { return fstat(fd, &info); })) {
        const Error error = file_error(path, "find the size of", errno);
        close(fd);
        throw error;
    }
    size = static_cast<uint64_t>(info.st_size);
    if (is_lfs_pointer()) {
        close(fd);
        throw Error(path +
                    ": is a Git LFS pointer, not the file itself; get the file with git lfs pull");
    }
}

// Without git-lfs, git checks out a small text file in place of a large file.
bool InputFile::is_lfs_pointer() const {
    constexpr char kFirstLine[] = "version https://git-lfs.github.com/spec/v1\n";
    constexpr size_t kLength = sizeof kFirstLine - 1;
    constexpr size_t kLargest = 1024;  // by the specification
    if (size < kLength || size > kLargest)
        return false;

    char found[kLength];
    const ssize_t n = uninterrupted([&] { return pread(fd, found, kLength, 0); });
    return n == ssize_t{kLength} && std::memcmp(found, kFirstLine, kLength) == 0;
}

void InputFile::read(uint64_t offset, void* out, size_t bytes) const {
    transfer(pread, "read", {.path = path, .fd = fd, .offset = offset}, static_cast<char*>(out),
             bytes);
}

std::string InputFile::read_from(uint64_t offset) const {
    std::string bytes(size - offset, '\0');
    read(offset, bytes.data(), bytes.size());
    return bytes;
}

void InputFile::require(bool ok, const std::string& damage) const {
    if (!ok)
        throw Error(path + ": " + damage + "; get the file again");
}

HeldFile::HeldFile(const std::string& path, int flags, const char* consequence)
    : path(path),
      fd(uninterrupted([&] { return open(path.c_str(), flags | O_CLOEXEC, 0666); })),
      consequence_(consequence) {
    if (fd < 0)
        throw file_error(path, "open", errno);
}

void HeldFile::warn_if_replaced() {
    struct stat held;
    struct stat named;
    if (warned_ || uninterrupted([&] { return fstat(fd, &held); }))
        return;

    const bool found = uninterrupted([&] { return stat(path.c_str(), &named); }) == 0;
    if (found && named.st_dev == held.st_dev && named.st_ino == held.st_ino)
        return;
    // After any other error we do not know which file has the name.
    if (!found && errno != ENOENT && errno != ENOTDIR)
        return;

    warned_ = true;
    print_error(format("warning: %s: was %s during the run; %s", path.c_str(),
                       found ? "replaced by another" : "removed", consequence_));
}

std::string temporary_path(const std::string& path) {
    return format("%s.tmp.%d", path.c_str(), static_cast<int>(getpid()));
}

static void sync_directory(const std::string& path) {
    const int fd =
        uninterrupted([&] { return open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
    if (fd < 0)
        throw file_error(path, "open", errno);
    const int error = uninterrupted([&] { return fsync(fd); }) ? errno : 0;
    close(fd);
    // EINVAL: this file system does not sync directories.
    if (error && error != EINVAL)
        throw file_error(path, "sync", error);
}

// First the data is synced, then the file gets its name, then the directory is synced. So whenever
// the machine crashes, the path has either the old file or the new one, whole.
void write_whole_file(const std::string& path, const std::vector<Block>& blocks) {
    check_regular(path);
    const std::string temporary = temporary_path(path);
    const int fd = uninterrupted(
        [&] { return open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666); });
    if (fd < 0)
        throw file_error(path, "create", errno);

    try {
        size_t written = 0;
        for (const Block& block : blocks) {
            transfer(pwrite, "write", {.path = path, .fd = fd, .offset = written},
                     static_cast<const char*>(block.data), block.bytes);
            written += block.bytes;
        }
        if (uninterrupted([&] { return fsync(fd); }))
            throw file_error(path, "write", errno);
        if (uninterrupted([&] { return rename(temporary.c_str(), path.c_str()); }))
            throw file_error(path, "rename the finished file to", errno);
    } catch (...) {
        close(fd);
        unlink(temporary.c_str());
        throw;
    }
    close(fd);

    const size_t slash = path.rfind('/');
    sync_directory(slash == std::string::npos ? "." : path.substr(0, slash + 1));
}

// -------------------------------------------------------------------------------------------------
// Checksums
//
// There are several lanes, so that the multiplications of one step overlap and the hash is as fast
// as memory.

// Adds a word to a lane. For a given word this is a bijection of the lane, and for a given lane a
// bijection of the word, because both multipliers are odd. So any change of a single word changes
// the result. The second multiplication spreads even the top bit of a word over many bits, so that
// a second small error is unlikely to cancel the first.
static uint64_t mix_word(uint64_t lane, uint64_t word) {
    lane += word * kGolden;
    lane = (lane << 31) | (lane >> 33);
    return lane * 0xD6E8FEB86659FD93u;
}

Checksum64::Checksum64(size_t total_bytes, uint64_t seed) : seed_(seed) {
    for (size_t i = 0; i < kLanes; i++) {
        lanes_[i] = mix_word(seed + i, total_bytes);
    }
}

void Checksum64::add(const void* piece, size_t bytes) {
    const char* p = static_cast<const char*>(piece);
    uint64_t lanes[kLanes];  // a copy, which the compiler keeps in registers
    uint64_t words[kLanes];
    std::memcpy(lanes, lanes_, sizeof lanes);

    size_t left = bytes;
    while (left >= kStep) {
        std::memcpy(words, p, sizeof words);
        for (size_t i = 0; i < kLanes; i++) {
            lanes[i] = mix_word(lanes[i], words[i]);
        }
        p += kStep;
        left -= kStep;
    }

    uint64_t last_words[kLanes] = {};  // padded with zeros
    if (left > 0)
        std::memcpy(last_words, p, left);
    for (size_t i = 0; i * sizeof(uint64_t) < left; i++) {
        lanes[i] = mix_word(lanes[i], last_words[i]);
    }
    std::memcpy(lanes_, lanes, sizeof lanes);
}

uint64_t Checksum64::value() const {
    uint64_t hash = seed_;
    for (const uint64_t lane : lanes_) {
        hash = mix_word(hash, lane);
        hash ^= hash >> 32;
    }
    return hash;
}

uint64_t checksum64(const void* data, size_t bytes, uint64_t seed) {
    Checksum64 checksum(bytes, seed);
    checksum.add(data, bytes);
    return checksum.value();
}
