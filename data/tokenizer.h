// Turns tokens into bytes and back. GPT-2's vocabulary has one token for each single byte, ids
// 0–255. They follow its byte-to-unicode table, first the printable bytes '!'..'~', 0xA1..0xAC,
// 0xAE..0xFF and then the others. <|endoftext|> is 50256. A byte-vocabulary model (V = 257) uses
// the same ids with <|endoftext|> as 256.
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

constexpr int kEndOfText = 50256;    // in GPT-2's vocabulary
constexpr int kByteEndOfText = 256;  // in a byte vocabulary
constexpr int kByteVocab = 257;

// The character that begins at text[at]. What is no UTF-8 has no bytes, and U+FFFD for a code.
struct Character {
    size_t bytes;
    uint32_t code;
};
Character character(const std::string& text, size_t at);
bool is_white_space(const std::string& text, size_t at);

// Throws Error with the offset of the first byte that is no UTF-8. `name` says in it where the text
// comes from.
void check_utf8(const std::string& text, const std::string& name);

// Encodes text byte by byte.
std::vector<int> encode_bytes(const std::string& text);

// Text to ids and back, with llm.c's tokenizer file (magic 20240328, versions 1 and 2). Without
// one, byte tokens become bytes, 50256 becomes "<|endoftext|>" and other ids become "<id>".
class Tokenizer {
  public:
    Tokenizer() = default;
    // "" is none. Throws Error: file, offset, expected, found
    explicit Tokenizer(const std::string& path);
    std::string decode(int token) const;

    // Byte by byte without a file, or for a vocabulary smaller than GPT-2's. Else as tiktoken's
    // encode_ordinary does, whose ids data/prepare.py writes: "<|endoftext|>" is a text like any
    // other. Invalid UTF-8 is an Error, as it is there. `name` says in it where the text comes
    // from. Takes n·log n for n bytes, whatever they are.
    std::vector<int> encode(const std::string& text, int vocab, const std::string& name) const;
    // The same of what a user writes to a model, where <|endoftext|> is the token.
    std::vector<int> encode_prompt(const std::string& text, int vocab,
                                   const std::string& name) const;
    bool has_pairs_for(int vocab) const { return vocab > kEndOfText && !pieces_.empty(); }

  private:
    std::string path_;
    std::vector<std::string> pieces_;
    std::unordered_map<std::string, int> ids_;  // of the pieces
    void encode_word(const std::string& word, std::vector<int>& tokens) const;
};
