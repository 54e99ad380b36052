// Turns text into tokens and back.
//
// GPT-2's vocabulary has one token for each byte, with ids 0–255 in the order of its
// byte-to-unicode table: first the printable bytes '!'..'~', 0xA1..0xAC and 0xAE..0xFF, then all
// others. <|endoftext|> is 50256. A model with a vocabulary of single bytes (V = 257) uses the same
// ids for bytes and has <|endoftext|> as 256.
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

struct InputFile;

constexpr int kEndOfText = 50256;    // in GPT-2's vocabulary
constexpr int kByteEndOfText = 256;  // in a vocabulary of bytes
constexpr int kGpt2Vocab = kEndOfText + 1;
constexpr int kByteVocab = kByteEndOfText + 1;

// The id of <|endoftext|> in a vocabulary of this size. A vocabulary that is neither of bytes nor
// as large as GPT-2's has no token with this id.
inline int end_of_text_id(int vocab) {
    return vocab == kByteVocab ? kByteEndOfText : kEndOfText;
}

// A character of UTF-8 text. If the bytes are not valid UTF-8, `bytes` is 0 and `code` U+FFFD.
struct Character {
    size_t bytes;
    uint32_t code;
};
Character character(const std::string& text, size_t at);
bool is_white_space(const std::string& text, size_t at);

// Throws Error with the offset of the first byte that is not UTF-8. `name` is the text's name for
// the message.
void check_utf8(const std::string& text, const std::string& name);

std::vector<int> encode_bytes(const std::string& text);

// Encodes and decodes with llm.c's tokenizer file (magic 20240328, versions 1 and 2). Without a
// file there are only byte tokens and 50256; decode() writes any other id as "<id>".
class Tokenizer {
  public:
    Tokenizer() = default;
    // Throws Error: file, offset, expected, found. Without a file `path` is "".
    explicit Tokenizer(const std::string& path);

    std::string decode(int token) const;

    // Encodes byte by byte if there is no file or the vocabulary is smaller than GPT-2's, otherwise
    // like tiktoken's encode_ordinary, which data/prepare.py uses: there "<|endoftext|>" is text
    // like any other, and invalid UTF-8 an Error. `name` is the text's name for the message. Takes
    // O(n log n) time for any n bytes.
    std::vector<int> encode(const std::string& text, int vocab, const std::string& name) const;
    // The same, except that "<|endoftext|>" becomes the token of that name.
    std::vector<int> encode_prompt(const std::string& text, int vocab,
                                   const std::string& name) const;

    // Whether encode() uses byte pair encoding.
    bool uses_bpe(int vocab) const { return vocab >= kGpt2Vocab && !pieces_.empty(); }

  private:
    std::string path_;
    std::vector<std::string> pieces_;           // the bytes of each token
    std::unordered_map<std::string, int> ids_;  // the token of each piece

    void read_pieces(const InputFile& file, uint32_t count);
    int find_id(const std::string& piece) const;
    std::vector<size_t> merge_pairs(const std::string& word) const;
    void encode_word(const std::string& word, std::vector<int>& tokens) const;
};
