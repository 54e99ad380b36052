// GPT-2's byte tokens, llm.c's tokenizer file, and byte pair encoding with it.
#include "data/tokenizer.h"

#include <compare>
#include <numeric>
#include <queue>
#include <sstream>
#include <string_view>

#include "data/file.h"
#include "data/text.h"

EMBED(unicode_kinds, "data/unicode_kinds.txt");

namespace {

// GPT-2 numbers the bytes that are visible characters in Latin-1 first ('!'..'~', '¡'..'¬',
// '®'..'ÿ'), then the rest.
struct Bytes {
    int token_of[256], byte_of[256];
};
const Bytes kBytes = [] {
    Bytes bytes;
    int token = 0;
    for (const bool visible : {true, false})
        for (int byte = 0; byte < 256; byte++)
            if (((byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD)) == visible) {
                bytes.token_of[byte] = token;
                bytes.byte_of[token++] = byte;
            }
    return bytes;
}();

constexpr uint32_t kMagic = 20240328;

// The kind of the character that begins at `at`: L, N, S or O, for a letter, a number, white space
// or another. The file has the kinds of all code points in order, as runs of a kind and a length
// (data/unicode_kinds.py).
char kind_of(const std::string& text, size_t at) {
    static const std::string kinds = [] {
        std::string kinds;
        std::istringstream runs({unicode_kinds_begin, unicode_kinds_end});
        size_t length;
        for (char kind; runs >> kind >> length;)
            kinds.append(length, kind);
        return kinds;
    }();
    return kinds[character(text, at).code];
}

// The end of the word that begins at `at`. GPT-2's pattern for words is
// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
size_t end_of_word(const std::string& text, size_t at) {
    if (text[at] == '\'')
        for (const std::string_view ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
            if (text.compare(at, ending.size(), ending) == 0)
                return at + ending.size();
    size_t begin = at;
    size_t last = at;  // of the last character
    if (text[at] == ' ' && at + 1 < text.size() && kind_of(text, at + 1) != 'S')
        begin++;
    const char kind = kind_of(text, begin);
    size_t end = begin;
    for (; end < text.size() && kind_of(text, end) == kind; end += character(text, end).bytes)
        last = end;
    // White space leaves its last character to the next word, but not its only one.
    return kind == 'S' && end < text.size() && last > at ? last : end;
}

}  // namespace

Character character(const std::string& text, size_t at) {
    // by the first four bits
    constexpr size_t bytes_of[] = {1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 2, 2, 3, 4};
    // by the number of bytes
    constexpr uint32_t least_of[] = {0, 0, 0x80, 0x800, 0x10000};
    const unsigned char first = text[at];
    const size_t bytes = bytes_of[first >> 4];
    uint32_t code = first & (0xFF >> bytes);
    for (size_t i = at + 1; i < at + bytes; i++) {
        if (i == text.size() || (text[i] & 0xC0) != 0x80)
            return {0, 0xFFFD};
        code = code << 6 | (text[i] & 0x3F);
    }
    const bool surrogate = code >= 0xD800 && code < 0xE000;
    if (bytes == 0 || code < least_of[bytes] || code > 0x10FFFF || surrogate)
        return {0, 0xFFFD};
    return {bytes, code};
}

bool is_white_space(const std::string& text, size_t at) {
    return kind_of(text, at) == 'S';
}

void check_utf8(const std::string& text, const std::string& name) {
    for (size_t at = 0, bytes; at < text.size(); at += bytes)
        if (bytes = character(text, at).bytes; bytes == 0)
            throw Error(
                format("%s: invalid UTF-8 at offset %zu: found byte 0x%02x; convert it to UTF-8",
                       name.c_str(), at, static_cast<unsigned char>(text[at])));
}

std::vector<int> encode_bytes(const std::string& text) {
    std::vector<int> tokens;
    tokens.reserve(text.size());
    for (const char c : text)
        tokens.push_back(kBytes.token_of[static_cast<unsigned char>(c)]);
    return tokens;
}

// The header is magic, version, number of tokens and, in version 2, the id of <|endoftext|>. Then
// each token follows as a byte of length and as many bytes of text.
Tokenizer::Tokenizer(const std::string& path) : path_(path) {
    if (path.empty())
        return;
    if (access(path.c_str(), F_OK) < 0)
        throw Error(path + ": cannot open: " + std::strerror(errno) +
                    "; data/prepare.py writes GPT-2's");
    const InputFile file(path);
    uint32_t header[kHeaderInts];
    file.read(0, header, kHeaderBytes);
    if (header[0] != kMagic)
        throw Error(path +
                    format(": wrong magic at offset 0: expected %u, found %u", kMagic, header[0]) +
                    "; give llm.c's gpt2_tokenizer.bin");
    if (header[1] != 1 && header[1] != 2)
        throw Error(path +
                    format(": wrong version at offset 4: expected 1 or 2, found %u", header[1]) +
                    "; write the file anew with llm.c's train_gpt2.py");
    const std::string text = file.rest(kHeaderBytes);
    const uint32_t count = header[2];
    const size_t most = std::min<size_t>(text.size(), 65536);  // a token of a shard has 16 bits
    file.require(
        count > 0 && count <= most,
        format("number of tokens at offset 8: expected 1..%zu (what %zu bytes can hold), found %u",
               most, text.size(), count));
    file.require(header[1] == 1 || header[3] < count,
                 format("id of <|endoftext|> at offset 12: expected less than %u, found %u", count,
                        header[3]));
    size_t at = 0;
    for (uint32_t token = 0; token < count; token++) {
        const size_t length = static_cast<unsigned char>(text[at]);  // 0 behind the end
        if (text.size() - at < 1 + length)
            file.require(
                false,
                format("truncated in token %u of %u at offset %zu: expected %zu bytes, found %zu",
                       token, count, kHeaderBytes + at, 1 + length, text.size() - at));
        pieces_.push_back(text.substr(at + 1, length));
        if (length)
            ids_.emplace(pieces_.back(), static_cast<int>(token));
        at += 1 + length;
    }
    file.require(at == text.size(), format("too long: expected %zu bytes for %u tokens, found %zu",
                                           kHeaderBytes + at, count, file.size));
}

std::string Tokenizer::decode(int token) const {
    if (token >= 0 && token < static_cast<int>(pieces_.size()))
        return pieces_[token];
    if (pieces_.empty() && token >= 0 && token < 256)
        return std::string(1, static_cast<char>(kBytes.byte_of[token]));
    return pieces_.empty() && token == kEndOfText ? kEndOfTextPiece : format("<%d>", token);
}

// Joins the two neighbouring parts that make the token of the lowest id, the leftmost of equals,
// until none do. A merge that was learnt earlier made a lower id, so ids are GPT-2's ranks of
// merges.
void Tokenizer::encode_word(const std::string& word, std::vector<int>& tokens) const {
    const auto find = [&](size_t begin, size_t end) {
        const auto found = ids_.find(word.substr(begin, end - begin));
        return found == ids_.end() ? -1 : found->second;
    };
    const size_t n = word.size();
    if (const int whole = find(0, n); whole >= 0)
        return tokens.push_back(whole);
    struct Pair {
        int token;
        size_t begin;
        size_t end;
        auto operator<=>(const Pair&) const = default;  // by token, then from left to right
    };
    std::vector<size_t> next(n + 1);
    std::vector<size_t> previous(n + 1);  // where the parts beside the part at i begin
    std::iota(next.begin(), next.end(), 1);
    std::iota(previous.begin(), previous.end(), -1);
    std::priority_queue<Pair, std::vector<Pair>, std::greater<>> pairs;
    const auto add_pair_at = [&](size_t begin) {
        if (next[begin] == n)
            return;
        const size_t end = next[next[begin]];
        if (const int token = find(begin, end); token >= 0)
            pairs.push({token, begin, end});
    };
    for (size_t i = 0; i < n; i++)
        add_pair_at(i);
    while (!pairs.empty()) {
        const auto [token, begin, end] = pairs.top();
        pairs.pop();
        const size_t middle = next[begin];
        // one of its parts has joined another
        if (next[middle] != end)
            continue;
        // so that no pair begins in the middle
        next[begin] = end;
        previous[end] = begin;
        next[middle] = n;
        add_pair_at(begin);
        if (begin > 0)
            add_pair_at(previous[begin]);
    }
    for (size_t begin = 0; begin < n; begin = next[begin]) {
        tokens.push_back(find(begin, next[begin]));
        if (tokens.back() < 0)
            throw Error(format("%s: no token for byte 0x%02x; give GPT-2's tokenizer file",
                               path_.c_str(), static_cast<unsigned char>(word[begin])));
    }
}

std::vector<int> Tokenizer::encode_prompt(const std::string& text, int vocab,
                                          const std::string& name) const {
    std::vector<int> tokens;
    for (const std::string& part : split(text, kEndOfTextPiece)) {
        const std::vector<int> ordinary = encode(part, vocab, name);
        tokens.push_back(vocab == kByteVocab ? kByteEndOfText : kEndOfText);
        tokens.insert(tokens.end(), ordinary.begin(), ordinary.end());
    }
    return {tokens.begin() + 1, tokens.end()};
}

std::vector<int> Tokenizer::encode(const std::string& text, int vocab,
                                   const std::string& name) const {
    if (!has_pairs_for(vocab))
        return encode_bytes(text);
    if (pieces_.size() > static_cast<size_t>(vocab))
        throw Error(format(
            "%s: %zu tokens, but the model's vocabulary is %d; give the tokenizer of this model",
            path_.c_str(), pieces_.size(), vocab));
    check_utf8(text, name);
    std::vector<int> tokens;
    for (size_t at = 0, end; at < text.size(); at = end) {
        end = end_of_word(text, at);
        encode_word(text.substr(at, end - at), tokens);
    }
    return tokens;
}
