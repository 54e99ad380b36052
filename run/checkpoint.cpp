// llm.c's model files and our training state.
//
// State file, little-endian:
//   0   8 bytes   magic "gpt2stat"
//   8   uint32    version
//   12  uint32    bytes of the table
//   16  table     uint32 fields, then for each: string name, string value
//                 uint32 sections, then for each: string name, uint64 bytes, uint64 checksum
//                 (a string: uint32 length, then as many bytes)
//   …   uint64    checksum of everything above
//   …   sections  back to back up to the end of the file. A run writes two (run/training.h):
//                 counters   the step, the model file's checksum, and where in its data the loader is
//                 optimizer  m and v, in bf16 also the fp32 master weights, in the order of the parameters
// The magic, the version, a checksum or the file's length covers every byte, so no flipped bit goes unnoticed.
#include "run/checkpoint.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <regex>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "checkpoints are written as they lie in memory");

// ---------------------------------------------------------------------------------------------------------------------
// llm.c's model files

size_t Config::num_parameters() const {
    const size_t c = static_cast<size_t>(C), norm = 2 * c;
    const size_t qkv = 3 * c * c + 3 * c, attproj = c * c + c, fc = 4 * c * c + 4 * c, fcproj = 4 * c * c + c;
    return (Vp + max_T) * c + L * (norm + qkv + attproj + norm + fc + fcproj) + norm;
}

ModelHeader read_model_header(const std::string& path) {
    const InputFile file(path);
    constexpr char kAgain[] = "get the file again";
    int32_t h[kHeaderInts];
    file.read(0, h, kHeaderBytes);
    constexpr char kModel[] = "give a model_….bin of this program or of a current llm.c";
    if (h[0] != kModelMagic) refuse(path, "wrong magic at offset 0", kModelMagic, h[0], kModel);
    if (h[1] != 3 && h[1] != 5) refuse(path, "wrong version at offset 4", "3 (fp32) or 5 (bf16)", h[1], kModel);
    const ModelHeader header = {h[1] == 3 ? DType::f32 : DType::bf16, {h[2], h[3], h[7], h[4], h[5], h[6]}};
    const Config& c = header.config;

    // Limits far above any GPT-2, so that sizes computed from a damaged header cannot overflow.
    const char* const names[] = {"maxT", "vocabulary", "layers", "heads", "channels", "padded vocabulary"};
    const int low[] = {1, 1, 1, 1, 1, c.V}, high[] = {1 << 24, 1 << 24, 1 << 12, 1 << 12, 1 << 18, 1 << 24};
    for (int i = 0; i < 6; i++)
        if (h[2 + i] < low[i] || h[2 + i] > high[i])
            refuse(path, format("damaged header: %s at offset %d", names[i], 8 + 4 * i),
                   format("%d..%d", low[i], high[i]), h[2 + i], kAgain);
    if (c.C % c.NH)
        refuse(path, "damaged header: channels at offset 24", format("a multiple of %d heads", c.NH), c.C, kAgain);
    const size_t expected = kHeaderBytes + header.bytes();
    if (file.size != expected)
        refuse(path, file.size < expected ? "truncated" : "too long",
               format("%zu bytes (%s)", expected, words(header).c_str()), file.size, kAgain);
    return header;
}

void read_model_parameters(const std::string& path, const ModelHeader& header, void* out) {
    InputFile(path).read(kHeaderBytes, out, header.bytes());
}

void write_model(const std::string& path, const ModelHeader& header, const void* parameters) {
    const Config& c = header.config;
    const int version = header.dtype == DType::f32 ? 3 : 5;
    const int32_t h[kHeaderInts] = {kModelMagic, version, c.max_T, c.V, c.L, c.NH, c.C, c.Vp};
    write_whole_file(path, {{h, kHeaderBytes}, {parameters, header.bytes()}});
}

std::string words(const ModelHeader& header) {
    const Config& c = header.config;
    return format("%s, L=%d NH=%d C=%d V=%d", name_of(header.dtype), c.L, c.NH, c.C, c.V);
}

// ---------------------------------------------------------------------------------------------------------------------
// Training state

static constexpr char kStateMagic[9] = "gpt2stat";
static constexpr uint32_t kStateVersion = 1;
static constexpr size_t kStateFixedBytes = 16;  // magic, version, table bytes

template <class T>
static void put(std::string& to, T value) {
    to.append(reinterpret_cast<const char*>(&value), sizeof value);
}
static void put(std::string& to, const std::string& text) {
    put(to, static_cast<uint32_t>(text.size()));
    to += text;
}

void write_state(const std::string& path, const Identity& identity, const std::vector<Section>& sections,
                 const std::function<void()>& before_rename) {
    std::string table;
    put(table, static_cast<uint32_t>(identity.fields.size() + identity.recipe.size()));
    for (const Fields& fields : {identity.fields, identity.recipe})
        for (const auto& [name, value] : fields) put(table, name), put(table, value);
    put(table, static_cast<uint32_t>(sections.size()));
    for (const Section& s : sections) {
        put(table, s.name);
        put(table, static_cast<uint64_t>(s.bytes));
        put(table, checksum64(s.data, s.bytes));
    }
    std::string head(kStateMagic, 8);
    put(head, kStateVersion);
    put(head, static_cast<uint32_t>(table.size()));
    head += table;
    put(head, checksum64(head.data(), head.size()));

    std::vector<Block> blocks = {{head.data(), head.size()}};
    for (const Section& s : sections) blocks.push_back({s.data, s.bytes});
    write_whole_file(path, blocks, before_rename);
}

namespace {

constexpr char kResumeFromAnother[] = "resume from another checkpoint or start anew";
constexpr char kOtherProgram[] = "resume with the program that wrote it";

// Reads a state file's values one after the other, from what is known to be whole of its beginning.
struct Reader {
    const InputFile& file;
    std::string head = {};
    size_t offset = 0;

    void extend(size_t bytes) {
        if (file.size < bytes)
            refuse(file.path, "truncated", format("at least %zu bytes", bytes), file.size, kResumeFromAnother);
        head.resize(bytes);
        file.read(0, head.data(), bytes);
    }
    void take(void* out, size_t bytes) {
        if (head.size() - offset < bytes)
            refuse(file.path, format("damaged table at offset %zu", offset), bytes, head.size() - offset,
                   kResumeFromAnother);
        std::memcpy(out, head.data() + offset, bytes);
        offset += bytes;
    }
    template <class T>
    T number() {
        T value;
        take(&value, sizeof value);
        return value;
    }
    std::string text() {
        std::string value(std::min<size_t>(number<uint32_t>(), head.size() - offset), '\0');
        take(value.data(), value.size());
        return value;
    }
    template <class Expected, class Found>
    void expect(const char* what, const Expected& expected, const Found& found) const {
        if (expected != found) refuse(file.path, what, expected, found, kOtherProgram);
    }
};

}  // namespace

std::string read_state(const std::string& path, const Identity& identity, const std::vector<Section>& sections) {
    const InputFile file(path);
    Reader reader{file};
    reader.extend(kStateFixedBytes);
    if (reader.head.compare(0, 8, kStateMagic))
        refuse(path, "wrong magic at offset 0", kStateMagic, hex(reader.number<uint64_t>()), "give a state file");
    reader.offset = 8;
    reader.expect("wrong version at offset 8", kStateVersion, reader.number<uint32_t>());
    const size_t table_end = kStateFixedBytes + reader.number<uint32_t>(), begin = table_end + sizeof(uint64_t);
    reader.extend(begin);
    reader.offset = table_end;
    const uint64_t expected = reader.number<uint64_t>(), found = checksum64(reader.head.data(), table_end);
    if (found != expected)
        refuse(path, format("damaged table: checksum at offset %zu", table_end), hex(expected), hex(found),
               kResumeFromAnother);
    reader.offset = kStateFixedBytes;
    std::string changes;
    reader.expect("fields", identity.fields.size() + identity.recipe.size(), reader.number<uint32_t>());
    for (const Fields* fields : {&identity.fields, &identity.recipe})
        for (const auto& [name, value] : *fields) {
            reader.expect("field", name, reader.text());
            const std::string had = reader.text();
            if (had == value) continue;
            if (fields == &identity.fields)
                throw Error(
                    format("%s: checkpoint of another run: %s: the checkpoint has \"%s\", this run has \"%s\"; give "
                           "another -o",
                           path.c_str(), name.c_str(), had.c_str(), value.c_str()));
            changes += (changes.empty() ? "" : ", ") + name + " from " + had + " to " + value;
        }

    // Every section must fit before the first byte is read into the caller's memory.
    std::vector<uint64_t> checksums;
    uint64_t offset = begin;
    reader.expect("sections", sections.size(), reader.number<uint32_t>());
    for (const Section& s : sections) {
        reader.expect("section", s.name, reader.text());
        const auto bytes = reader.number<uint64_t>();
        if (bytes != s.bytes)
            refuse(path, format("section \"%s\" at offset %zu", s.name.c_str(), offset), format("%zu bytes", s.bytes),
                   bytes, "resume with the same settings");
        checksums.push_back(reader.number<uint64_t>());
        offset += bytes;
    }
    if (file.size != offset)
        refuse(path, file.size < offset ? "truncated" : "too long", format("%zu bytes", offset), file.size,
               kResumeFromAnother);
    offset = begin;
    for (size_t i = 0; i < sections.size(); i++) {
        const Section& s = sections[i];
        file.read(offset, s.data, s.bytes);
        const uint64_t found = checksum64(s.data, s.bytes);
        if (found != checksums[i])
            refuse(path, format("damaged section \"%s\" (%zu bytes at offset %zu)", s.name.c_str(), s.bytes, offset),
                   hex(checksums[i]), hex(found), kResumeFromAnother);
        offset += s.bytes;
    }
    return changes;
}

// ---------------------------------------------------------------------------------------------------------------------
// The checkpoints of a run

std::string model_path(const std::string& dir, int step) {
    return format("%s/model_%08d.bin", dir.c_str(), step);
}
std::string state_path(const std::string& dir, int step) {
    return format("%s/state_%08d.bin", dir.c_str(), step);
}

namespace {

struct CheckpointFile {
    std::string name, kind;  // kind: "model", "state", "temporary" of a run that was cut off, or "" for the log
    int step;
};

// The files in `dir` that are named like model_path, state_path, the log and their temporaries. None if there is no such
// directory. Refuses one that is no file.
std::vector<CheckpointFile> list_checkpoints(const std::string& dir) {
    static const std::regex pattern("(?:(model|state)_([0-9]{8}|[1-9][0-9]{8,9})[.]bin|log[.]jsonl)([.]tmp[.][0-9]+)?");
    std::vector<CheckpointFile> files;
    std::error_code no_directory;
    for (const auto& entry : std::filesystem::directory_iterator(dir, no_directory)) {
        const std::string name = entry.path().filename();
        std::smatch part;
        if (!std::regex_match(name, part, pattern)) continue;
        const long long step = part[2].matched ? std::stoll(part[2]) : 0;
        if (step > INT_MAX) continue;
        const bool temporary = part[3].matched;
        if (!temporary) check_regular(entry.path());
        files.push_back({name, temporary ? "temporary" : part[1].str(), static_cast<int>(step)});
    }
    return files;
}

}  // namespace

int newest_checkpoint(const std::string& dir, const std::string& kind) {
    int newest = -1;
    for (const CheckpointFile& f : list_checkpoints(dir))
        if (f.kind == kind) newest = std::max(newest, f.step);
    return newest;
}

int checkpoint_to_resume(const std::string& dir) {
    const int state = newest_checkpoint(dir), model = newest_checkpoint(dir, "model");
    if (model <= state) return state;
    // A run that ended between the two renames leaves its state's temporary (Run::write_checkpoint).
    const std::string missing = state_path(dir, model) + ": is missing, ";
    bool killed = state >= 0;
    for (const CheckpointFile& f : list_checkpoints(dir)) killed |= f.kind == "temporary" && !f.name.find("state");
    if (!killed) throw Error(missing + "and -y needs it beside its model; bring it back, or give another -o");
    std::fprintf(stderr, "%sso its model does not count\n", missing.c_str());
    return state;
}

void prune_checkpoints(const std::string& dir, int keep, int keep_every) {
    const auto remove = [](const std::string& path) {
        if (uninterrupted([&] { return unlink(path.c_str()); }) && errno != ENOENT)
            throw file_error(path, "remove", errno);
    };
    std::vector<int> steps;
    const std::vector<CheckpointFile> files = list_checkpoints(dir);
    for (const CheckpointFile& f : files)
        if (f.kind == "state") steps.push_back(f.step);
    for (const CheckpointFile& f : files) {
        const bool has_state = std::find(steps.begin(), steps.end(), f.step) != steps.end();
        if (f.kind == "temporary" || (f.kind == "model" && !steps.empty() && !has_state)) remove(dir + "/" + f.name);
    }
    std::sort(steps.rbegin(), steps.rend());
    for (size_t i = keep > 0 ? keep : steps.size(); i < steps.size(); i++) {
        if (keep_every > 0 && steps[i] % keep_every == 0) continue;
        // The state goes first, because without it the step no longer counts as complete if we stop before the model.
        remove(state_path(dir, steps[i]));
        remove(model_path(dir, steps[i]));
    }
}
