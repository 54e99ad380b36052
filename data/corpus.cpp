// The built-in corpus on disk: dir/train.bin and dir/val.bin, llm.c shards of byte tokens, and dir/corpus.txt. That
// file names the version of grammar and code, and for each shard its tokens, nats and checksum. It is written last, so
// the corpus is whole when corpus.txt is there and agrees with the shards.
#include "data/corpus.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "data/file.h"
#include "data/grammar.h"
#include "data/tokenizer.h"
#include "layers/gpu/error.h"

// The grammar is data/stories.txt, in the notation of data/grammar.h. What a story says early decides what happens
// later. The tables carry that: a row of `wish` is a wish with the trouble, the advice and the end that fit it.
//
// The assembler copies the text into this object, so that the program is one file and runs from any directory. The path
// is relative to the repository root, where make compiles.
extern "C" const char stories_begin[], stories_end[];
asm(R"(
    .pushsection .rodata
    stories_begin:
    .incbin "data/stories.txt"
    stories_end:
    .popsection
)");

namespace {

constexpr uint64_t kSeed = 1;
constexpr int kFormat = 1;  // raise it when a change here or in grammar.cpp writes other bytes
// Validation comes first, so that its stories stay what they are if the training split ever grows.
constexpr uint64_t kValStories = 1100, kTrainStories = 31000;

std::string source() {
    return {stories_begin, stories_end};
}
const Grammar& stories() {
    static const Grammar grammar(source());
    return grammar;
}

struct Split {
    std::string path;
    uint64_t tokens = 0, checksum = 0;
    double nats = 0;  // per token
};

// ---- llm.c token shard: 256 int32 {magic, version, count, 0 …}, then uint16 tokens.
constexpr size_t kHeaderBytes = 256 * sizeof(int32_t);

std::vector<uint16_t> shard_of(uint64_t first, uint64_t count, Split& split) {
    uint16_t token_of[256];
    for (int byte = 0; byte < 256; byte++)
        token_of[byte] = static_cast<uint16_t>(byte_to_token(static_cast<unsigned char>(byte)));

    // Blocks are written in parallel and joined in order: the same shard for any number of threads.
    constexpr uint64_t kBlock = 200;
    const int blocks = static_cast<int>((count + kBlock - 1) / kBlock);
    std::vector<std::vector<uint16_t>> tokens(blocks);
    std::vector<double> nats(blocks);
#pragma omp parallel for schedule(dynamic)
    for (int b = 0; b < blocks; b++) {
        for (uint64_t i = b * kBlock; i < std::min(count, (b + 1) * kBlock); i++) {
            const Story story = write_story(kSeed, first + i);
            tokens[b].push_back(kEndOfText);
            for (unsigned char byte : story.text) tokens[b].push_back(token_of[byte]);
            nats[b] += story.nats;
        }
    }
    std::vector<uint16_t> shard(kHeaderBytes / sizeof(uint16_t));
    for (const auto& block : tokens) shard.insert(shard.end(), block.begin(), block.end());
    split.tokens = shard.size() - kHeaderBytes / sizeof(uint16_t);
    for (double n : nats) split.nats += n / static_cast<double>(split.tokens);
    const int32_t header[3] = {20240520, 1, static_cast<int32_t>(split.tokens)};
    std::memcpy(shard.data(), header, sizeof header);
    split.checksum = checksum64(shard.data(), shard.size() * sizeof(uint16_t));
    return shard;
}

void write_file(const std::string& path, const void* data, size_t bytes) {
    AtomicFile file(path);
    file.write(data, bytes);
    file.commit();
}

bool is_whole(const Split& split) {
    std::ifstream file(split.path, std::ios::binary);
    const uint64_t bytes = kHeaderBytes + split.tokens * sizeof(uint16_t);
    std::error_code error;
    if (!file || std::filesystem::file_size(split.path, error) != bytes) return false;
    std::vector<char> content(bytes);
    file.read(content.data(), static_cast<std::streamsize>(bytes));
    return file && checksum64(content.data(), bytes) == split.checksum;
}

// ---- corpus.txt
std::string version() {
    const std::string what = format("%d %d %d %d ", kFormat, static_cast<int>(kSeed), static_cast<int>(kTrainStories),
                                    static_cast<int>(kValStories)) +
                             source();
    return format("%016llx", static_cast<unsigned long long>(checksum64(what.data(), what.size())));
}

std::string description(const Split& train, const Split& val) {
    std::string text = format("Built-in corpus, written by this program; it may be deleted.\nversion %s\nseed %llu\n",
                              version().c_str(), static_cast<unsigned long long>(kSeed));
    for (const Split* s : {&train, &val})
        text +=
            format("%s %llu tokens, %.17g nats per token, checksum %016llx\n", s == &train ? "train" : "val",
                   static_cast<unsigned long long>(s->tokens), s->nats, static_cast<unsigned long long>(s->checksum));
    return text;
}

// Reads dir/corpus.txt into the splits; false if it or a shard is missing, truncated, foreign or of another version.
bool find_corpus(const std::string& path, Split& train, Split& val) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    Split t{train.path}, v{val.path};
    std::string line;
    std::stringstream lines(text.str());
    while (std::getline(lines, line))
        for (Split* s : {&t, &v}) {
            unsigned long long tokens, checksum;
            const char* form = s == &t ? "train %llu tokens, %lf nats per token, checksum %llx"
                                       : "val %llu tokens, %lf nats per token, checksum %llx";
            if (std::sscanf(line.c_str(), form, &tokens, &s->nats, &checksum) == 3)
                s->tokens = tokens, s->checksum = checksum;
        }
    if (description(t, v) != text.str() || !is_whole(t) || !is_whole(v)) return false;
    train = t;
    val = v;
    return true;
}

// Held while the corpus is written, so that a second process waits and then finds it. Where locks do not exist
// both write the same bytes, each under its own temporary name.
class DirectoryLock {
  public:
    explicit DirectoryLock(const std::string& path) : fd_(open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0666)) {
        if (fd_ >= 0) flock(fd_, LOCK_EX);
    }
    ~DirectoryLock() {
        if (fd_ >= 0) close(fd_);
    }
    DirectoryLock(const DirectoryLock&) = delete;
    DirectoryLock& operator=(const DirectoryLock&) = delete;

  private:
    int fd_;
};

}  // namespace

Story write_story(uint64_t seed, uint64_t index) {
    static const int root = stories().rule("story");
    Story story{"", 0};
    story.text = stories().write(root, seed, index, story.nats);
    return story;
}

Corpus builtin_corpus(const std::string& dir, bool quiet) {
    Split train{dir + "/train.bin"}, val{dir + "/val.bin"};
    const std::string about = dir + "/corpus.txt";
    const auto corpus = [&] { return Corpus{train.path, val.path, train.tokens, val.tokens, train.nats, val.nats}; };
    if (find_corpus(about, train, val)) return corpus();
    bool announced = false;
    try {
        std::filesystem::create_directories(dir);
        const DirectoryLock lock(dir + "/corpus.lock");
        if (find_corpus(about, train, val)) return corpus();

        const auto start = std::chrono::steady_clock::now();
        if ((announced = !quiet))
            std::fprintf(stderr, "writing the built-in corpus to %s (30 M tokens) … ", dir.c_str());
        for (Split* s : {&train, &val}) {
            const std::vector<uint16_t> shard =
                s == &val ? shard_of(0, kValStories, *s) : shard_of(kValStories, kTrainStories, *s);
            write_file(s->path, shard.data(), shard.size() * sizeof(uint16_t));
        }
        const std::string text = description(train, val);
        write_file(about, text.data(), text.size());
        if (announced)
            std::fprintf(stderr, "%.1f s\n",
                         std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    } catch (const std::exception& e) {
        if (announced) std::fprintf(stderr, "\n");
        throw Error(
            format("%s: cannot write the built-in corpus there (%s); make the directory writable (70 MB), or name "
                   "your own data",
                   dir.c_str(), e.what()));
    }
    return corpus();
}
