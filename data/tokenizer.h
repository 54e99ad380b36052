// Turns tokens into bytes and back. GPT-2's vocabulary has one token for each single byte, ids 0–255. They follow its
// byte-to-unicode table, first the printable bytes '!'..'~', 0xA1..0xAC, 0xAE..0xFF and then the others. <|endoftext|>
// is 50256. A byte-vocabulary model (V = 257) uses the same ids with <|endoftext|> as 256.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

constexpr int kEndOfText = 50256;      // in GPT-2's vocabulary
constexpr int kByteEndOfText = 256;    // in a byte vocabulary
constexpr int kByteVocab = 257;

int byte_to_token(unsigned char byte);   // 0..255
int token_to_byte(int token);            // -1 if the token is not a single byte

// Encodes UTF-8 text byte by byte.
std::vector<int> encode_bytes(const std::string& text);

// Decodes ids to text. With llm.c's tokenizer file (magic 20240328, versions 1 and 2) it decodes every id. Without one,
// byte tokens become bytes, 50256 becomes "<|endoftext|>" and other ids become "<id>".
class Tokenizer {
  public:
    Tokenizer() = default;
    explicit Tokenizer(const std::string& path);  // throws Error: file, offset, expected, found
    std::string decode(int token) const;

  private:
    std::vector<std::string> pieces_;
};
