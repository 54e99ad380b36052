// GPT-2's byte tokens, llm.c's tokenizer file, and byte pair encoding.
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

constexpr uint32_t kTokenizerMagic = 20240328;

// -------------------------------------------------------------------------------------------------
// Bytes

struct ByteTokens {
    int token_of[256];
    int byte_of[256];
};

// Whether a byte is a visible character in Latin-1: '!'..'~', '¡'..'¬' or '®'..'ÿ'.
bool is_visible(int byte) {
    const bool ascii = byte >= '!' && byte <= '~';
    const bool latin_1 = byte >= 0xA1 && byte != 0xAD;
    return ascii || latin_1;
}

// GPT-2 numbers the visible bytes first, then the rest.
const ByteTokens kByteTokens = [] {
    ByteTokens tokens;
    int token = 0;
    for (const bool visible : {true, false}) {
        for (int byte = 0; byte < 256; byte++) {
            if (is_visible(byte) != visible)
                continue;
            tokens.token_of[byte] = token;
            tokens.byte_of[token] = byte;
            token++;
        }
    }
    return tokens;
}();

// -------------------------------------------------------------------------------------------------
// Words

// Every code point's kind: L, N, S or O, for a letter, a number, white space or anything else. The
// file has runs of a kind and a length, in the order of code points (data/unicode_kinds.py).
std::string read_kinds() {
    std::string kinds;
    std::istringstream runs({unicode_kinds_begin, unicode_kinds_end});
    char kind = 0;
    size_t length = 0;
    while (runs >> kind >> length) {
        kinds.append(length, kind);
    }
    return kinds;
}

char kind_of(const std::string& text, size_t at) {
    static const std::string kinds = read_kinds();
    return kinds[character(text, at).code];
}

// The length of a contraction such as 's or 'll, or 0.
size_t contraction_length(const std::string& text, size_t at) {
    if (text[at] != '\'')
        return 0;
    for (const std::string_view ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
        if (text.compare(at, ending.size(), ending) == 0)
            return ending.size();
    }
    return 0;
}

// The end of the word that starts at `at`. GPT-2's pattern for words is
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
size_t end_of_word(const std::string& text, size_t at) {
    const size_t contraction = contraction_length(text, at);
    if (contraction > 0)
        return at + contraction;

    // A blank belongs to the word that follows it.
    const bool leading_blank =
        text[at] == ' ' && at + 1 < text.size() && kind_of(text, at + 1) != 'S';
    const size_t begin = leading_blank ? at + 1 : at;
    const char kind = kind_of(text, begin);
    size_t last = begin;  // where the last character starts
    size_t end = begin;
    while (end < text.size() && kind_of(text, end) == kind) {
        last = end;
        end += character(text, end).bytes;
    }
    // White space leaves its last character to the next word, unless it is the only one.
    if (kind == 'S' && end < text.size() && last > begin)
        return last;
    return end;
}

}  // namespace

Character character(const std::string& text, size_t at) {
    constexpr Character kInvalid = {.bytes = 0, .code = 0xFFFD};
    // By the first four bits: how many bytes a character has, 0 if none starts with them.
    constexpr size_t kLengthOf[16] = {1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 2, 2, 3, 4};
    // By the number of bytes: the smallest code that is not encoded in fewer, which UTF-8 demands.
    constexpr uint32_t kSmallestOf[5] = {0, 0, 0x80, 0x800, 0x10000};

    const unsigned char first = text[at];
    const size_t bytes = kLengthOf[first >> 4];
    // The first byte starts with as many ones as there are bytes (none if it is the only one), then
    // a zero. A fifth one, which is invalid, stays in the code and makes it too large.
    uint32_t code = first & (0xFF >> bytes);
    for (size_t i = at + 1; i < at + bytes; i++) {
        const bool continues = i < text.size() && (text[i] & 0xC0) == 0x80;
        if (!continues)
            return kInvalid;
        code = (code << 6) | (text[i] & 0x3F);
    }
    const bool is_surrogate = code >= 0xD800 && code < 0xE000;
    if (bytes == 0 || code < kSmallestOf[bytes] || code > 0x10FFFF || is_surrogate)
        return kInvalid;
    return {.bytes = bytes, .code = code};
}

bool is_white_space(const std::string& text, size_t at) {
    return kind_of(text, at) == 'S';
}

void check_utf8(const std::string& text, const std::string& name) {
    size_t at = 0;
    while (at < text.size()) {
        const size_t bytes = character(text, at).bytes;
        if (bytes == 0)
            throw Error(
                format("%s: invalid UTF-8 at offset %zu: found byte 0x%02x; convert it to UTF-8",
                       name.c_str(), at, static_cast<unsigned char>(text[at])));
        at += bytes;
    }
}

std::vector<int> encode_bytes(const std::string& text) {
    std::vector<int> tokens;
    tokens.reserve(text.size());
    for (const char c : text) {
        tokens.push_back(kByteTokens.token_of[static_cast<unsigned char>(c)]);
    }
    return tokens;
}

// -------------------------------------------------------------------------------------------------
// The tokenizer

Tokenizer::Tokenizer(const std::string& path) : path_(path) {
    if (path.empty())
        return;
    if (access(path.c_str(), F_OK) < 0)
        throw Error(path + ": cannot open: " + std::strerror(errno) +
                    "; data/prepare.py writes GPT-2's tokenizer file");

    const InputFile file(path);
    uint32_t header[kHeaderInts];
    file.read(0, header, kHeaderBytes);
    const uint32_t magic = header[0];
    const uint32_t version = header[1];
    const uint32_t count = header[2];
    const uint32_t end_of_text = header[3];  // in version 2
    if (magic != kTokenizerMagic)
        throw Error(
            format("%s: wrong magic at offset 0: expected %u, found %u; "
                   "give llm.c's gpt2_tokenizer.bin",
                   path.c_str(), kTokenizerMagic, magic));
    if (version != 1 && version != 2)
        throw Error(format(
            "%s: wrong version at offset 4: expected 1 or 2, found %u; write the file again with "
            "data/prepare.py",
            path.c_str(), version));

    const size_t bytes = file.size - kHeaderBytes;
    const size_t most = std::min<size_t>(bytes, 65536);  // a shard's tokens have 16 bits
    file.require(
        count > 0 && count <= most,
        format("number of tokens at offset 8: expected 1..%zu (what %zu bytes can hold), found %u",
               most, bytes, count));
    file.require(version == 1 || end_of_text < count,
                 format("id of <|endoftext|> at offset 12: expected less than %u, found %u", count,
                        end_of_text));
    read_pieces(file, count);
}

// After the header each token is stored as one byte, which is its length, and its bytes.
void Tokenizer::read_pieces(const InputFile& file, uint32_t count) {
    const std::string text = file.read_from(kHeaderBytes);
    size_t at = 0;
    for (uint32_t token = 0; token < count; token++) {
        const size_t length = static_cast<unsigned char>(text[at]);  // 0 at the end of the text
        const size_t left = text.size() - at;
        if (left < 1 + length)  // tested here, so that no message is formatted for good tokens
            file.require(
                false,
                format("truncated in token %u of %u at offset %zu: expected %zu bytes, found %zu",
                       token, count, kHeaderBytes + at, 1 + length, left));
        pieces_.push_back(text.substr(at + 1, length));
        if (length > 0)
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
        return std::string(1, static_cast<char>(kByteTokens.byte_of[token]));
    if (pieces_.empty() && token == kEndOfText)
        return kEndOfTextPiece;
    return format("<%d>", token);
}

int Tokenizer::find_id(const std::string& piece) const {
    const auto found = ids_.find(piece);
    return found == ids_.end() ? -1 : found->second;
}

// Byte pair encoding: of all neighbouring parts of the word that together are a token, joins the
// pair whose token has the lowest id, the leftmost if there are several, until there is none. (A
// merge that was learnt earlier made a lower id, so ids are the ranks of GPT-2's merges.) Returns
// where the parts that are left end: element i is the end of the part that starts at byte i.
std::vector<size_t> Tokenizer::merge_pairs(const std::string& word) const {
    struct Pair {
        int token;
        size_t begin;
        size_t end;
        auto operator<=>(const Pair&) const = default;  // by token, then from left to right
    };
    const size_t n = word.size();
    // Where the parts next to the one that starts at byte i start: next[i] after it, previous[i]
    // before it. At first each byte is a part. No part starts at n, and next[n] is n + 1, which is
    // no pair's end.
    std::vector<size_t> next(n + 1);
    std::vector<size_t> previous(n + 1);
    std::iota(next.begin(), next.end(), 1);
    std::iota(previous.begin(), previous.end(), -1);

    std::priority_queue<Pair, std::vector<Pair>, std::greater<>> pairs;
    const auto add_pair_at = [&](size_t begin) {
        if (next[begin] == n)
            return;  // the last part
        const size_t end = next[next[begin]];
        const int token = find_id(word.substr(begin, end - begin));
        if (token >= 0)
            pairs.push({.token = token, .begin = begin, .end = end});
    };
    for (size_t i = 0; i < n; i++) {
        add_pair_at(i);
    }

    while (!pairs.empty()) {
        const auto [token, begin, end] = pairs.top();
        pairs.pop();
        const size_t middle = next[begin];
        const bool outdated = next[middle] != end;  // one of its parts has joined another since
        if (outdated)
            continue;

        next[begin] = end;
        previous[end] = begin;
        // No part starts here any more. A pair that did is outdated, because next[n] is not its
        // end.
        next[middle] = n;
        add_pair_at(begin);
        if (begin > 0)
            add_pair_at(previous[begin]);
    }
    return next;
}

void Tokenizer::encode_word(const std::string& word, std::vector<int>& tokens) const {
    const int whole = find_id(word);
    if (whole >= 0) {
        tokens.push_back(whole);
        return;
    }

    const std::vector<size_t> part_end = merge_pairs(word);
    size_t begin = 0;
    while (begin < word.size()) {
        const size_t end = part_end[begin];
        const int token = find_id(word.substr(begin, end - begin));
        if (token < 0)
            throw Error(format("%s: has no token for byte 0x%02x; give GPT-2's tokenizer file",
                               path_.c_str(), static_cast<unsigned char>(word[begin])));
        tokens.push_back(token);
        begin = end;
    }
}

std::vector<int> Tokenizer::encode(const std::string& text, int vocab,
                                   const std::string& name) const {
    if (!uses_bpe(vocab))
        return encode_bytes(text);
    if (pieces_.size() > static_cast<size_t>(vocab))
        throw Error(format(
            "%s: has %zu tokens, but the model's vocabulary has %d; give the tokenizer of this "
            "model",
            path_.c_str(), pieces_.size(), vocab));
    check_utf8(text, name);

    std::vector<int> tokens;
    size_t at = 0;
    while (at < text.size()) {
        const size_t end = end_of_word(text, at);
        encode_word(text.substr(at, end - at), tokens);
        at = end;
    }
    return tokens;
}

std::vector<int> Tokenizer::encode_prompt(const std::string& text, int vocab,
                                          const std::string& name) const {
    std::vector<int> tokens;
    bool is_first = true;
    for (const std::string& part : split(text, kEndOfTextPiece)) {
        if (!is_first)
            tokens.push_back(end_of_text_id(vocab));
        is_first = false;
        const std::vector<int> ordinary = encode(part, vocab, name);
        tokens.insert(tokens.end(), ordinary.begin(), ordinary.end());
    }
    return tokens;
}
