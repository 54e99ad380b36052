// The built-in corpus on disk: dir/train.bin and dir/val.bin, llm.c shards of byte tokens. They are the same bytes on
// every machine, so their checksums stand here and tell whether the corpus is whole.
#include "data/corpus.h"

#include <sys/file.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <regex>

#include "data/file.h"
#include "data/grammar.h"
#include "data/tokenizer.h"

// The grammar is data/stories.txt, in the notation of data/grammar.h. What a story says early decides what happens
// later. The tables carry that: a row of `wish` is a wish with the trouble, the advice and the end that fit it.
EMBED(stories, "data/stories.txt");

namespace {

constexpr int kSeed = 1;
// What the grammar writes. After a change of data/stories.txt dev/test_corpus says what belongs here.
struct Split {
    const char* file;
    int first, stories;
    uint64_t checksum;
};
// Validation comes first, so that its stories stay what they are if the training split ever grows.
constexpr Split kVal = {"/val.bin", 0, 1100, 0x8c77f048a27d775f};
constexpr Split kTrain = {"/train.bin", 1100, 31000, 0x1fbde22c378e520d};
constexpr double kValNats = 0.12731075475943862;  // per token

// False if the shard is missing, truncated, damaged or foreign.
bool is_whole(const std::string& dir, const Split& split) {
    try {
        const std::string shard = InputFile(dir + split.file).rest();
        return checksum64(shard.data(), shard.size()) == split.checksum;
    } catch (const Error&) {
        return false;
    }
}

// Writes some stories as an llm.c token shard: 256 int32 {magic, version, count, 0 …}, then uint16 tokens.
void write_shard(const std::string& dir, const Split& split) {
    std::vector<std::string> stories(split.stories);
#pragma omp parallel for schedule(dynamic, 100)
    for (int i = 0; i < split.stories; i++) stories[i] = write_story(kSeed, split.first + i);

    constexpr size_t kHeaderTokens = kHeaderBytes / sizeof(uint16_t);
    std::vector<uint16_t> shard(kHeaderTokens);
    for (const std::string& story : stories) {
        shard.push_back(kEndOfText);
        const std::vector<int> tokens = encode_bytes(story);
        shard.insert(shard.end(), tokens.begin(), tokens.end());
    }
    const int32_t header[3] = {kShardMagic, 1, static_cast<int32_t>(shard.size() - kHeaderTokens)};
    std::memcpy(shard.data(), header, sizeof header);
    const size_t bytes = shard.size() * sizeof(uint16_t);
    if (const uint64_t checksum = checksum64(shard.data(), bytes); checksum != split.checksum)
        throw Error(format("%s has checksum %016zx, expected %016zx", split.file, checksum, split.checksum));
    write_whole_file(dir + split.file, {{shard.data(), bytes}});
}

}  // namespace

std::string write_story(uint64_t seed, uint64_t index) {
    static const Grammar grammar({stories_begin, stories_end});
    static const int root = grammar.rule("story");
    return grammar.write(root, seed, index);
}

Corpus builtin_corpus(const std::string& dir, bool quiet) {
    const Corpus corpus = {dir + kTrain.file, dir + kVal.file, kValNats};
    const auto all_is_whole = [&] { return is_whole(dir, kTrain) && is_whole(dir, kVal); };
    if (all_is_whole()) return corpus;
    bool announced = false;
    try {
        std::filesystem::create_directories(dir);
        check_regular(dir + "/corpus.lock");
        // A second process waits here, and then finds the corpus. Where locks do not exist both write the same bytes,
        // each under its own temporary name.
        const std::unique_ptr<FILE, int (*)(FILE*)> lock(std::fopen((dir + "/corpus.lock").c_str(), "ae"), fclose);
        const bool locked = lock && uninterrupted([&] { return flock(fileno(lock.get()), LOCK_EX); }) == 0;
        if (all_is_whole()) return corpus;
        static const std::regex temporary("(train|val)[.]bin[.]tmp[.][0-9]+");
        if (locked)  // so a temporary is of a process that was killed
            for (const auto& entry : std::filesystem::directory_iterator(dir))
                if (std::regex_match(entry.path().filename().string(), temporary)) std::filesystem::remove(entry);

        const auto start = std::chrono::steady_clock::now();
        if (!quiet) std::fprintf(stderr, "writing the built-in corpus to %s (30 M tokens) … ", dir.c_str());
        announced = !quiet;
        write_shard(dir, kTrain);
        write_shard(dir, kVal);
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        if (announced) std::fprintf(stderr, "%.1f s\n", seconds.count());
    } catch (const std::exception& e) {
        if (announced) std::fprintf(stderr, "\n");
        throw Error(dir + ": cannot write the built-in corpus there (" + e.what() +
                    "); make the directory writable (70 MB), or name your own data");
    }
    return corpus;
}
