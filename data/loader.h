// Batches from token shards or plain text.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/file.h"
#include "data/tokenizer.h"

// Where the loader is. This is enough to go on bit-exactly.
struct LoaderState {
    uint64_t epoch = 0, window = 0;  // windows of this epoch handed out
    uint64_t batches = 0;            // handed out since the start
};

// The vocabulary that suits training data, single bytes or GPT-2's. The first tokens of the first shard tell. Text is in
// bytes unless a tokenizer will have `encoded` it.
int vocabulary_of(const std::string& pattern, bool encoded);

// Windows of T+1 tokens start every T tokens of each shard, so the last target of one window is the first input of the
// next. An epoch visits every window once. With shuffle, (seed, epoch) permutes shards and windows anew each epoch. B
// windows make a batch. If they do not divide an epoch, its last batch takes windows of the next one.
//
// `pattern`: a file or a glob of llm.c shards, or one plain text file. A shard is a header of 256 int32 (magic
// 20240520, version 1, count) and then uint16 tokens. Any other file is text. It is one document after <|endoftext|>.
// With a tokenizer file and GPT-2's vocabulary it is encoded at the start and kept in memory. Else its bytes become
// byte ids as it is read. Shards may be many and larger than 2 GiB, because they are read as needed, never whole.
// `vocab`: an id ≥ vocab is an error that names file and offset. With vocab == kByteVocab <|endoftext|> is mapped to
// 256. Throws Error on no match, a wrong magic or version, truncation (expected and found bytes), a token ≥ vocab, and
// fewer than B windows.
class Loader {
  public:
    Loader(const std::string& pattern, int B, int T, int vocab, bool shuffle, uint64_t seed,
           const Tokenizer& tokenizer = {});

    // Writes inputs and targets (B,T). The targets are the inputs shifted by one.
    void next(int* inputs, int* targets);
    void skip(uint64_t batches);   // as next, without reading them
    void reset() { restore({}); }  // back to the first batch of epoch 0

    LoaderState state() const { return state_; }
    void restore(const LoaderState&);

    uint64_t num_tokens() const { return tokens_; }               // in all shards
    uint64_t batches_per_epoch() const { return windows_ / B_; }  // whole batches
    // "12 shards, 1.2 G tokens" / "text file, 3.4 M tokens" / "text file, 0.9 M BPE tokens"
    const std::string& description() const { return description_; }
    bool is_text_in_bytes() const { return is_text_ && encoded_.empty(); }
    uint64_t identity() const;  // tells data apart: a hash of the shards' sizes and samples of their content

  private:
    struct Shard {
        std::string path;
        uint64_t tokens, file_bytes;
    };
    uint64_t B_, T_, seed_;
    int vocab_, end_of_text_;
    bool shuffle_, is_text_ = false;
    std::vector<Shard> shards_;
    std::vector<int> encoded_;           // the whole text, if a tokenizer encoded it
    uint64_t tokens_ = 0, windows_ = 0;  // in all shards
    std::string description_;

    LoaderState state_;
    std::vector<size_t> order_;           // shards in the order of this epoch
    std::vector<uint64_t> first_window_;  // of order_[i] in this epoch, and behind the last the number of all windows
    std::unique_ptr<InputFile> file_;     // the shard in use

    Shard inspect(const std::string& path, bool only_file, const Tokenizer& tokenizer);
    uint64_t windows_in(const Shard& shard) const { return shard.tokens > 0 ? (shard.tokens - 1) / T_ : 0; }
    uint64_t key(uint64_t epoch, uint64_t what) const;
    void begin_epoch();
    std::vector<int> read_window();
    void advance();
};
