// Batches from token shards or plain text.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/random.h"
#include "data/file.h"
#include "data/tokenizer.h"

// Where the loader is. This is enough to go on bit-exactly.
struct LoaderState {
    uint64_t epoch = 0, window = 0;  // windows of this epoch handed out
    uint64_t batches = 0;            // handed out since the start
};

// Where a loader's tokens come from: files, or memory.
struct Source {
    // a file or a glob, or what messages call the tokens in memory
    std::string name = {};
    const std::vector<uint16_t>* tokens = nullptr;  // GPT-2's ids, which must outlive the loader

    Source() = default;
    Source(const char* pattern) : name(pattern) {}
    Source(const std::string& pattern) : name(pattern) {}
    Source(const std::string& name, const std::vector<uint16_t>& tokens)
        : name(name), tokens(&tokens) {}
    bool empty() const { return name.empty(); }
};

// The vocabulary that data needs, single bytes or GPT-2's. Text is in bytes unless a tokenizer will
// have `encoded` it. Of shards all tokens are read, up to the first that is no byte.
int vocabulary_of(const std::string& pattern, bool encoded);

// Windows of T+1 tokens start every T tokens of each shard, so the last target of one window is the
// first input of the next. An epoch visits every window once. With shuffle, (seed, epoch) permutes
// shards and windows anew each epoch. B windows make a batch. If they do not divide an epoch, its
// last batch takes windows of the next one. Nobody sees the tail of a shard that is shorter than a
// window. description() says how much that is.
//
// `source`: a file or a glob of llm.c shards, or one plain text file, or tokens in memory. A shard
// is a header of 256 int32 (magic 20240520, version 1, count) and then uint16 tokens. Any other
// file is text, whose documents() each follow an <|endoftext|>. With a tokenizer file and GPT-2's
// vocabulary they are in BPE, else in byte ids. Text is kept in memory, two bytes a token. Shards
// may be many and larger than 2 GiB, because they are read as needed, never whole. `vocab`: an id ≥
// vocab is an error that names file and offset. With vocab == kByteVocab <|endoftext|> is mapped to
// 256. Throws Error on no match, a wrong magic or version, truncation (expected and found bytes),
// and a token ≥ vocab. Data that is neither shard nor text is an Error too, and so is data without
// a window.
class Loader {
  public:
    Loader(const Source& source, int B, int T, int vocab, bool shuffle, uint64_t seed,
           const Tokenizer& tokenizer = {});

    // Writes inputs and targets (B,T). The targets are the inputs shifted by one.
    void next(int* inputs, int* targets);
    void skip(uint64_t batches);   // as next, without reading them
    void reset() { restore({}); }  // back to the first batch of epoch 0

    LoaderState state() const { return state_; }
    void restore(const LoaderState&);

    uint64_t windows() const { return windows_; }  // of an epoch
    // "12 shards, 1.2 G tokens" / "text file, 3.4 M tokens" / "text file, 0.9 M BPE tokens". Tokens
    // that no window has are counted behind that, and shards without a window are named (left_out).
    const std::string& description() const { return description_; }
    // tells data apart: a hash of the shards' sizes and samples of their content
    uint64_t identity() const;

  private:
    struct Shard {
        std::string path;
        uint64_t tokens, file_bytes;
    };
    uint64_t B_, T_, seed_;
    int vocab_, end_of_text_;
    bool shuffle_, is_text_ = false, is_bpe_ = false;
    std::vector<Shard> shards_;
    std::vector<uint16_t> text_;         // the tokens of a text file
    const uint16_t* memory_ = nullptr;   // those of a source in memory
    uint64_t tokens_ = 0, windows_ = 0;  // in all shards
    std::string description_;

    LoaderState state_;
    std::vector<size_t> order_;  // shards in the order of this epoch
    // of order_[i] in this epoch, and behind the last the number of all windows
    std::vector<uint64_t> first_window_;
    std::unique_ptr<InputFile> file_;  // the shard in use

    void check_end_of_text(const std::string& name) const;
    Shard inspect(const std::string& path, bool only_file, const Tokenizer& tokenizer);
    Shard read_text(const InputFile& file, const Tokenizer& tokenizer);
    std::string left_out() const;
    uint64_t windows_in(const Shard& shard) const {
        return shard.tokens > 0 ? (shard.tokens - 1) / T_ : 0;
    }
    // of a permutation
    uint64_t key(uint64_t what) const { return mix(mix(seed_ ^ mix(state_.epoch)) ^ what); }
    void begin_epoch();
    std::vector<int> read_window();
    void advance();
};
