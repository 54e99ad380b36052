// GPT-2's byte tokens and llm.c's tokenizer file.
#include "data/tokenizer.h"

#include <array>

#include "data/file.h"

namespace {

// GPT-2 numbers the bytes that are visible characters in Latin-1 first ('!'..'~', '¡'..'¬', '®'..'ÿ'), then the rest.
constexpr bool is_printable(int byte) {
    return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct ByteTables {
    std::array<int, 256> token_of{}, byte_of{};
};
constexpr ByteTables make_byte_tables() {
    ByteTables tables;
    int token = 0;
    for (const bool printable : {true, false})
        for (int byte = 0; byte < 256; byte++)
            if (is_printable(byte) == printable) {
                tables.token_of[byte] = token;
                tables.byte_of[token++] = byte;
            }
    return tables;
}
constexpr ByteTables kBytes = make_byte_tables();

constexpr char kEndOfTextPiece[] = "<|endoftext|>";
constexpr uint32_t kMagic = 20240328;
constexpr size_t kHeaderBytes = 256 * sizeof(uint32_t);

}  // namespace

int byte_to_token(unsigned char byte) {
    return kBytes.token_of[byte];
}
int token_to_byte(int token) {
    return token >= 0 && token < 256 ? kBytes.byte_of[token] : -1;
}

std::vector<int> encode_bytes(const std::string& text) {
    std::vector<int> tokens;
    tokens.reserve(text.size());
    for (const char c : text) tokens.push_back(byte_to_token(static_cast<unsigned char>(c)));
    return tokens;
}

// The header is magic, version, number of tokens and, in version 2, the id of <|endoftext|>. Then each token follows as
// a byte of length and as many bytes of text.
Tokenizer::Tokenizer(const std::string& path) {
    const InputFile file(path);
    const char* name = path.c_str();
    uint32_t header[kHeaderBytes / sizeof(uint32_t)];
    file.read(0, header, kHeaderBytes);
    if (header[0] != kMagic)
        throw Error(format("%s: wrong magic at offset 0: expected %u, found %u; give llm.c's gpt2_tokenizer.bin", name,
                           kMagic, header[0]));
    if (header[1] != 1 && header[1] != 2)
        throw Error(
            format("%s: wrong version at offset 4: expected 1 or 2, found %u; write the file anew with llm.c's "
                   "train_gpt2.py",
                   name, header[1]));
    std::string text(file.size - kHeaderBytes, '\0');
    file.read(kHeaderBytes, text.data(), text.size());
    const uint32_t count = header[2];
    if (count == 0 || count > text.size())
        throw Error(format(
            "%s: number of tokens at offset 8: expected 1..%zu (what %zu bytes can hold), found %u; get the file "
            "again",
            name, text.size(), text.size(), count));
    if (header[1] == 2 && header[3] >= count)
        throw Error(format("%s: id of <|endoftext|> at offset 12: expected less than %u, found %u; get the file again",
                           name, count, header[3]));
    size_t at = 0;
    for (uint32_t token = 0; token < count; token++) {
        const size_t length = at < text.size() ? static_cast<unsigned char>(text[at]) : 0;
        if (at >= text.size() || text.size() - at - 1 < length)
            throw Error(format(
                "%s: truncated in token %u of %u at offset %zu: expected %zu bytes, found %zu; get the file again",
                name, token, count, kHeaderBytes + at, 1 + length, text.size() - at));
        pieces_.push_back(text.substr(at + 1, length));
        at += 1 + length;
    }
    if (at != text.size())
        throw Error(format("%s: too long: expected %zu bytes for %u tokens, found %zu; get the file again", name,
                           kHeaderBytes + at, count, kHeaderBytes + text.size()));
}

std::string Tokenizer::decode(int token) const {
    if (token >= 0 && static_cast<size_t>(token) < pieces_.size()) return pieces_[static_cast<size_t>(token)];
    if (pieces_.empty()) {
        const int byte = token_to_byte(token);
        if (byte >= 0) return std::string(1, static_cast<char>(byte));
        if (token == kEndOfText) return kEndOfTextPiece;
    }
    return format("<%d>", token);
}
