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
// Every byte is covered by the magic, the version, the length of the file or a checksum, so no flipped bit goes
// unnoticed.
#include "run/checkpoint.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <regex>

#include "data/text.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "checkpoints are written as they lie in memory");

// ---------------------------------------------------------------------------------------------------------------------
// llm.c's model files

size_t Config::num_parameters() const {
    const size_t c = static_cast<size_t>(C), norm = 2 * c;
    const size_t qkv = 3 * c * c + 3 * c, attproj = c * c + c, fc = 4 * c * c + 4 * c, fcproj = 4 * c * c + c;
    return (Vp + max_T) * c + L * (norm + qkv + attproj + norm + fc + fcproj) + norm;
}

static ModelHeader read_model_header(const InputFile& file) {
    const char* path = file.path.c_str();
    int32_t h[kHeaderInts];
    if (file.size < kHeaderBytes)
        throw Error(
            format("%s: truncated: expected a header of %zu bytes, found a file of %zu; is this a model checkpoint?",
                   path, kHeaderBytes, file.size));
    file.read(0, h, kHeaderBytes);
    if (h[0] != kModelMagic)
        throw Error(format("%s: wrong magic at offset 0: expected %d, found %d; %s", path, kModelMagic, h[0],
                           h[0] == kShardMagic ? "this is a token shard, give it as training data"
                                               : "give a model_….bin of this program or of llm.c"));
    if (h[1] != 3 && h[1] != 5)
        throw Error(
            format("%s: wrong version at offset 4: expected 3 (fp32) or 5 (bf16), found %d; write the file anew with a "
                   "current llm.c",
                   path, h[1]));
    const ModelHeader header = {h[1] == 3 ? DType::f32 : DType::bf16, {h[2], h[3], h[7], h[4], h[5], h[6]}};
    const Config& c = header.config;

    // Limits far above any GPT-2, so that sizes computed from a damaged header cannot overflow.
    const struct {
        const char* name;
        int index, low, high;
    } bounds[] = {
        {"maxT", 2, 1, 1 << 24},  {"vocabulary", 3, 1, 1 << 24}, {"layers", 4, 1, 1 << 12},
        {"heads", 5, 1, 1 << 12}, {"channels", 6, 1, 1 << 18},   {"padded vocabulary", 7, c.V, 1 << 24},
    };
    for (const auto& b : bounds)
        if (h[b.index] < b.low || h[b.index] > b.high)
            throw Error(format("%s: damaged header: %s at offset %d: expected %d..%d, found %d; get the file again",
                               path, b.name, 4 * b.index, b.low, b.high, h[b.index]));
    if (c.C % c.NH)
        throw Error(
            format("%s: damaged header: channels at offset 24: expected a multiple of %d heads, found %d; get the file "
                   "again",
                   path, c.NH, c.C));
    const size_t expected = kHeaderBytes + header.bytes();
    if (file.size != expected)
        throw Error(format("%s: %s: expected %zu bytes (%s, %d layers, %d channels), found %zu; get the file again",
                           path, file.size < expected ? "truncated" : "too long", expected, name_of(header.dtype), c.L,
                           c.C, file.size));
    return header;
}

ModelHeader read_model_header(const std::string& path) {
    return read_model_header(InputFile(path));
}

void read_model_parameters(const std::string& path, const ModelHeader& header, void* out) {
    const InputFile file(path);
    const ModelHeader now = read_model_header(file);
    const size_t n = header.config.num_parameters(), found = now.config.num_parameters();
    if (now.dtype != header.dtype || found != n)
        throw Error(format("%s: expected %zu parameters in %s, found %zu in %s; the file changed while it was read",
                           path.c_str(), n, name_of(header.dtype), found, name_of(now.dtype)));
    file.read(kHeaderBytes, out, header.bytes());
}

void write_model(const std::string& path, const ModelHeader& header, const void* parameters) {
    if (header.dtype != DType::f32 && header.dtype != DType::bf16)
        throw Error(format("%s: a model file holds fp32 or bf16, not %s", path.c_str(), name_of(header.dtype)));
    const Config& c = header.config;
    const int version = header.dtype == DType::f32 ? 3 : 5;
    const int32_t h[kHeaderInts] = {kModelMagic, version, c.max_T, c.V, c.L, c.NH, c.C, c.Vp};
    write_whole_file(path, {{h, kHeaderBytes}, {parameters, header.bytes()}});
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

// Reads values one after the other from the beginning of a state file, from `offset` up to `end`.
struct Reader {
    const std::string &path, &head;
    size_t offset, end;

    void take(void* out, size_t bytes) {
        if (end - offset < bytes)
            throw Error(
                format("%s: damaged table at offset %zu: expected %zu bytes, found %zu; resume from another checkpoint",
                       path.c_str(), offset, bytes, end - offset));
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
        std::string value(std::min<size_t>(number<uint32_t>(), end - offset), '\0');
        take(value.data(), value.size());
        return value;
    }
};

struct StoredSection {
    uint64_t offset, bytes, checksum;
};
struct StoredState {
    std::map<std::string, std::string> identity;
    std::map<std::string, StoredSection> sections;
};

// Reads the table of a state file and checks magic, version, checksum and the file's length against the sections.
StoredState read_table(const InputFile& file) {
    const char* path = file.path.c_str();
    std::string head;
    const auto read_head = [&](size_t bytes) {
        if (file.size < bytes)
            throw Error(format("%s: truncated: expected at least %zu bytes, found %zu; %s", path, bytes, file.size,
                               kResumeFromAnother));
        head.resize(bytes);
        file.read(0, head.data(), bytes);
    };
    read_head(kStateFixedBytes);
    Reader reader{file.path, head, 0, head.size()};
    const uint64_t magic = reader.number<uint64_t>();
    if (head.compare(0, 8, kStateMagic))
        throw Error(format("%s: wrong magic at offset 0: expected \"%s\", found bytes %016zx; %s", path, kStateMagic,
                           __builtin_bswap64(magic),
                           static_cast<int32_t>(magic) == kModelMagic
                               ? "this is a model file, it holds no training state"
                               : "give a state file of this program"));
    const uint32_t version = reader.number<uint32_t>();
    if (version != kStateVersion)
        throw Error(
            format("%s: wrong version at offset 8: expected %u, found %u; resume with the program that wrote it", path,
                   kStateVersion, version));
    const size_t table_end = kStateFixedBytes + reader.number<uint32_t>();
    read_head(table_end + sizeof(uint64_t));
    const uint64_t expected = Reader{file.path, head, table_end, head.size()}.number<uint64_t>();
    const uint64_t found = checksum64(head.data(), table_end);
    if (found != expected)
        throw Error(format("%s: damaged table (checksum at offset %zu: expected %016zx, found %016zx); %s", path,
                           table_end, expected, found, kResumeFromAnother));

    StoredState state;
    reader.end = table_end;
    for (uint32_t n = reader.number<uint32_t>(); n > 0; n--) {
        const std::string name = reader.text();
        state.identity[name] = reader.text();
    }
    uint64_t offset = head.size();
    for (uint32_t n = reader.number<uint32_t>(); n > 0; n--) {
        StoredSection& s = state.sections[reader.text()];
        s.offset = offset;
        s.bytes = reader.number<uint64_t>();
        s.checksum = reader.number<uint64_t>();
        offset += s.bytes;
    }
    if (file.size != offset)
        throw Error(format("%s: %s: expected %zu bytes, found %zu; %s", path,
                           file.size < offset ? "truncated" : "too long", offset, file.size, kResumeFromAnother));
    return state;
}

void check_identity(const std::string& path, std::map<std::string, std::string> stored, const Identity& ours) {
    const auto check = [&](const std::string& name, const std::string& had, const std::string& have) {
        if (had != have)
            throw Error(
                format("%s: checkpoint of another run: %s: the checkpoint has %s, this run has %s; resume with the "
                       "same settings or start anew in another directory",
                       path.c_str(), name.c_str(), had.c_str(), have.c_str()));
    };
    for (const auto& [name, value] : ours.fields) {
        check(name, stored.count(name) ? "\"" + stored[name] + "\"" : "no such field", "\"" + value + "\"");
        stored.erase(name);
    }
    for (const auto& [name, value] : stored) check(name, "\"" + value + "\"", "none");
}

}  // namespace

std::string read_state(const std::string& path, const Identity& identity, const std::vector<Section>& sections) {
    const InputFile file(path);
    StoredState stored = read_table(file);
    std::string changes;
    for (const auto& [name, value] : identity.recipe) {
        const auto had = stored.identity.extract(name);  // absent from states that older programs wrote
        if (had && had.mapped() != value)
            changes += (changes.empty() ? "" : ", ") + name + " from " + had.mapped() + " to " + value;
    }
    check_identity(path, stored.identity, identity);

    // Checks that every section has its counterpart before the first byte is read into the caller's memory.
    std::map<std::string, StoredSection> others = stored.sections;
    for (const Section& want : sections) {
        if (!others.erase(want.name))
            throw Error(format("%s: section \"%s\" is missing; resume with the program that wrote it", path.c_str(),
                               want.name.c_str()));
        const StoredSection& s = stored.sections[want.name];
        if (s.bytes != want.bytes)
            throw Error(
                format("%s: section \"%s\" at offset %zu: expected %zu bytes, found %zu; resume with the same settings",
                       path.c_str(), want.name.c_str(), s.offset, want.bytes, s.bytes));
    }
    for (const auto& [name, s] : others)
        throw Error(format("%s: section \"%s\" at offset %zu is not of this run; resume with the program that wrote it",
                           path.c_str(), name.c_str(), s.offset));
    for (const Section& want : sections) {
        const StoredSection& s = stored.sections[want.name];
        file.read(s.offset, want.data, s.bytes);
        const uint64_t found = checksum64(want.data, s.bytes);
        if (found != s.checksum)
            throw Error(format(
                "%s: damaged section \"%s\" (%zu bytes at offset %zu): expected checksum %016zx, found %016zx; %s",
                path.c_str(), want.name.c_str(), s.bytes, s.offset, s.checksum, found, kResumeFromAnother));
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
    std::string name, kind;  // kind: "model", "state", "llm.c" for a state of llm.c, or "" for the log
    int step;
    bool temporary;  // left behind by a run that was cut off
};

// The files in `dir` that are named like model_path, state_path, the log, their temporaries and llm.c's states. Those
// have a rank in their names. None if there is no such directory. Refuses one that is no file.
std::vector<CheckpointFile> list_checkpoints(const std::string& dir) {
    static const std::regex pattern(
        "(?:(model|state)_([0-9]{8}|[1-9][0-9]{8,9})(_[0-9]{5})?[.]bin|log[.]jsonl)([.]tmp[.][0-9]+)?");
    std::vector<CheckpointFile> files;
    std::error_code no_directory;
    for (const auto& entry : std::filesystem::directory_iterator(dir, no_directory)) {
        const std::string name = entry.path().filename();
        std::smatch part;
        if (!std::regex_match(name, part, pattern)) continue;
        const long long step = part[2].matched ? std::stoll(part[2]) : 0;
        if (step > INT_MAX) continue;
        const std::string kind = part[3].matched ? "llm.c" : part[1].str();
        if (!part[4].matched) check_regular(entry.path());
        files.push_back({name, kind, static_cast<int>(step), part[4].matched});
    }
    return files;
}

}  // namespace

int newest_checkpoint(const std::string& dir, bool of_llm_c) {
    int newest = -1;
    for (const CheckpointFile& f : list_checkpoints(dir))
        if (f.kind == (of_llm_c ? "llm.c" : "state") && !f.temporary) newest = std::max(newest, f.step);
    return newest;
}

int newest_model(const std::string& dir) {
    int newest = -1;
    for (const CheckpointFile& f : list_checkpoints(dir))
        if (f.kind == "model" && !f.temporary) newest = std::max(newest, f.step);
    return newest;
}

int checkpoint_to_resume(const std::string& dir) {
    const int state = newest_checkpoint(dir), model = newest_model(dir);
    const std::string newer = state_path(dir, model);
    if (state >= 0 && access(model_path(dir, state).c_str(), F_OK))
        throw Error(
            format("%s: is missing, and -y needs it beside its state; bring it back, or remove the state to go on from "
                   "the checkpoint before",
                   model_path(dir, state).c_str()));
    if (model <= state) return state;
    // A run that ended between the two renames leaves its state's temporary (Run::write_checkpoint).
    bool killed = state >= 0;
    for (const CheckpointFile& f : list_checkpoints(dir)) killed |= f.kind == "state" && f.temporary;
    if (!killed)
        throw Error(
            format("%s: is missing, and -y needs it beside its model; bring it back, or give another -o, and -e %s for "
                   "the weights",
                   newer.c_str(), shell_quoted(model_path(dir, model)).c_str()));
    std::fprintf(stderr, "%s: is missing, so its model does not count\n", newer.c_str());
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
        if (f.kind == "state" && !f.temporary) steps.push_back(f.step);
    for (const CheckpointFile& f : files) {
        const bool has_state = std::find(steps.begin(), steps.end(), f.step) != steps.end();
        if (f.temporary || (f.kind == "model" && !steps.empty() && !has_state)) remove(dir + "/" + f.name);
    }
    std::sort(steps.rbegin(), steps.rend());
    for (size_t i = keep > 0 ? keep : steps.size(); i < steps.size(); i++) {
        if (keep_every > 0 && steps[i] % keep_every == 0) continue;
        // The state goes first, because without it the step no longer counts as complete if we stop before the model.
        remove(state_path(dir, steps[i]));
        remove(model_path(dir, steps[i]));
    }
}
