// The built-in corpus on disk: dir/train.bin and dir/val.bin, llm.c shards of byte tokens, and dir/corpus.txt. That
// file names the version of grammar and code, and for each shard its tokens, nats and checksum. It is written last, so
// the corpus is whole when corpus.txt is there and agrees with the shards.
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

constexpr int kFormat = 1;  // raise it when a change here or in grammar.cpp writes other bytes
// Validation comes first, so that its stories stay what they are if the training split ever grows.
constexpr int kSeed = 1, kValStories = 1100, kTrainStories = 31000;

std::string grammar_text() {
    return {stories_begin, stories_end};
}

struct Split {
    std::string name, path;
    uint64_t tokens = 0, checksum = 0;
    double nats = 0;  // per token
};

// Writes some stories as an llm.c token shard: 256 int32 {magic, version, count, 0 …}, then uint16 tokens.
void write_shard(Split& split, uint64_t first, int count) {
    std::vector<Story> stories(count);
#pragma omp parallel for schedule(dynamic, 100)
    for (int i = 0; i < count; i++) stories[i] = write_story(kSeed, first + i);

    constexpr size_t kHeaderTokens = kHeaderBytes / sizeof(uint16_t);
    std::vector<uint16_t> shard(kHeaderTokens);
    double nats = 0;
    for (const Story& story : stories) {
        shard.push_back(kEndOfText);
        const std::vector<int> tokens = encode_bytes(story.text);
        shard.insert(shard.end(), tokens.begin(), tokens.end());
        nats += story.nats;
    }
    split.tokens = shard.size() - kHeaderTokens;
    split.nats = nats / static_cast<double>(split.tokens);
    const int32_t header[3] = {kShardMagic, 1, static_cast<int32_t>(split.tokens)};
    std::memcpy(shard.data(), header, sizeof header);
    split.checksum = checksum64(shard.data(), shard.size() * sizeof(uint16_t));
    write_whole_file(split.path, {{shard.data(), shard.size() * sizeof(uint16_t)}});
}

// What corpus.txt says.
std::string description(const Split& train, const Split& val) {
    const std::string what = format("%d %d %d %d ", kFormat, kSeed, kTrainStories, kValStories) + grammar_text();
    std::string text = format("Built-in corpus, written by this program; it may be deleted.\nversion %016zx\nseed %d\n",
                              checksum64(what.data(), what.size()), kSeed);
    for (const Split& s : {train, val})
        text += format("%s %zu tokens, %.17g nats per token, checksum %016zx\n", s.name.c_str(), s.tokens, s.nats,
                       s.checksum);
    return text;
}

// What a file holds, "" if it cannot be read.
std::string content_of(const std::string& path) {
    try {
        return InputFile(path).rest();
    } catch (const Error&) {
        return "";
    }
}

// Reads corpus.txt into the splits. False if it or a shard is missing, truncated, foreign or of another version.
bool find_corpus(const std::string& about, Split& train, Split& val) {
    const std::string text = content_of(about);
    for (Split* s : {&train, &val}) {
        const size_t at = std::min(text.find("\n" + s->name + " "), text.size());
        std::sscanf(&text[at], " %*s %zu tokens, %lf nats per token, checksum %zx", &s->tokens, &s->nats, &s->checksum);
    }
    if (description(train, val) != text) return false;
    for (const Split* s : {&train, &val}) {
        const std::string shard = content_of(s->path);
        if (checksum64(shard.data(), shard.size()) != s->checksum) return false;
    }
    return true;
}

}  // namespace

Story write_story(uint64_t seed, uint64_t index) {
    static const Grammar grammar(grammar_text());
    static const int root = grammar.rule("story");
    Story story{"", 0};
    story.text = grammar.write(root, seed, index, story.nats);
    return story;
}

Corpus builtin_corpus(const std::string& dir, bool quiet) {
    Split train{"train", dir + "/train.bin"}, val{"val", dir + "/val.bin"};
    const std::string about = dir + "/corpus.txt";
    const auto corpus = [&] { return Corpus{train.path, val.path, train.tokens, val.tokens, train.nats, val.nats}; };
    if (find_corpus(about, train, val)) return corpus();
    bool announced = false;
    try {
        static const std::regex temporary("(train[.]bin|val[.]bin|corpus[.]txt)[.]tmp[.][0-9]+");
        std::filesystem::create_directories(dir);
        check_regular(dir + "/corpus.lock");
        // A second process waits here, and then finds the corpus. Where locks do not exist both write the same bytes,
        // each under its own temporary name.
        const std::unique_ptr<FILE, int (*)(FILE*)> lock(std::fopen((dir + "/corpus.lock").c_str(), "ae"), fclose);
        const bool locked = lock && uninterrupted([&] { return flock(fileno(lock.get()), LOCK_EX); }) == 0;
        if (find_corpus(about, train, val)) return corpus();
        if (locked)  // so a temporary is of a process that was killed
            for (const auto& entry : std::filesystem::directory_iterator(dir))
                if (std::regex_match(entry.path().filename().string(), temporary)) std::filesystem::remove(entry);

        const auto start = std::chrono::steady_clock::now();
        if (!quiet) std::fprintf(stderr, "writing the built-in corpus to %s (30 M tokens) … ", dir.c_str());
        announced = !quiet;
        write_shard(train, kValStories, kTrainStories);
        write_shard(val, 0, kValStories);
        const std::string text = description(train, val);
        write_whole_file(about, {{text.data(), text.size()}});
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        if (announced) std::fprintf(stderr, "%.1f s\n", seconds.count());
    } catch (const std::exception& e) {
        if (announced) std::fprintf(stderr, "\n");
        throw Error(
            format("%s: cannot write the built-in corpus there (%s); make the directory writable (70 MB), or "
                   "name your own data",
                   dir.c_str(), e.what()));
    }
    return corpus();
}
